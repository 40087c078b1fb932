"""Matplotlib without a window: every figure becomes one picture, whether it is shown, saved or left open.

Replaces the module `matplotlib_inline.backend_inline` in the kernel, which matplotlib loads by default and for
`%matplotlib inline`. The original draws a figure that is left open three times, this one once; and it does not see
figures of code that chose `Agg`. Nothing here imports matplotlib unless the code does.
"""

import io
import sys
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from guest.forms import CHART
from guest.kernels.charts import facts_of, matplotlib_chart
from guest.kernels.display import Screen
from guest.kernels.fonts import load_fonts
from guest.kernels.libraries import ADAPTERS, AfterImport
from guest.kernels.pictures import is_shown

BACKEND = "matplotlib_inline.backend_inline"


class Figures(Loader, MetaPathFinder):
    """Loads itself as matplotlib's backend module and tracks what a cell has shown."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._shown: list[Any] = []  # figures that this cell has shown
        self._saved: list[Any] = []  # figures that it has saved as artifacts

    def find_spec(self, fullname: str, *_args: object) -> ModuleSpec | None:
        """Find the backend module, for Python's import system."""
        return ModuleSpec(fullname, self) if fullname == BACKEND else None

    def exec_module(self, module: ModuleType) -> None:
        """Define what matplotlib expects of a backend."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        contents = {"FigureCanvas": FigureCanvasAgg, "show": self.show, "configure_inline_support": ignore}
        vars(module).update(contents)

    def show(self, *_args: object, **_kwargs: object) -> None:
        """Show all open figures and close them: `plt.show()`. One that cannot be drawn does not hide the others."""
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        failures = []
        try:
            for manager in managers():
                try:
                    if forms := self.forms(manager.canvas.figure):
                        self._screen.show(forms)
                except Exception as error:
                    failures.append(error)
        finally:
            pyplot.close("all")
        if failures:
            raise failures[0]

    def forms(self, figure: Any) -> dict[str, Any]:  # noqa: ANN401 - a matplotlib Figure
        """Return a figure as PNG with its facts: the PNG unless it is saved, nothing if it was shown already."""
        unchanged = not figure.stale
        if unchanged and among(figure, self._shown):
            return {}
        forms: dict[str, Any] = {"text/plain": repr(figure)}
        if not (unchanged and among(figure, self._saved)):
            forms["image/png"] = drawn(figure)
        self._shown.append(figure)
        figure.stale = False  # any change sets it again
        return {**forms, CHART: facts_of(figure, matplotlib_chart)}

    def is_part(self, value: object) -> bool:
        """Return whether a value is part of a figure that this cell shows, such as what `plt.plot` returns."""
        artist: Any = getattr(sys.modules.get("matplotlib.artist"), "Artist", None)
        if artist is None or "matplotlib._pylab_helpers" not in sys.modules:
            return False
        if isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray":
            items: Any = getattr(value, "flat", value)
            value = next(iter(items), None)
        figure = getattr(value, "figure", None) if isinstance(value, artist) else None
        figures = [*self._shown, *(manager.canvas.figure for manager in managers())]
        return figure is not None and figure is not value and among(figure, figures)

    def end_cell(self) -> None:
        """Show the figures that a cell has left open. Raises what one that cannot be drawn raises."""
        if "matplotlib._pylab_helpers" not in sys.modules:
            return
        try:
            if managers():
                self.show()
        finally:
            self._shown.clear()
            self._saved.clear()

    # ------------------------------------------------------------ after matplotlib's import

    def adapt_agg(self, module: Any) -> None:  # noqa: ANN401 - matplotlib.backends.backend_agg
        """Let `plt.show()` show figures of code that chose Agg, where it would leave them open for the next plot."""
        module.show = self.show

    def adapt_saving(self, module: Any) -> None:  # noqa: ANN401 - matplotlib.figure
        """Notice the figures that are saved as artifacts: these are shown."""
        save = module.Figure.savefig

        @wraps(save)  # pyplot looks at its name
        def savefig(figure: Any, fname: Any, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as in matplotlib
            save(figure, fname, *args, **options)
            if is_shown(fname, options.get("format")):
                self._saved.append(figure)
                figure.stale = False

        module.Figure.savefig = savefig


class Pixels:
    """A file to save a figure in as `rgba`: it keeps what matplotlib writes, rows of pixels."""

    def __init__(self) -> None:
        self.rows: Any = None

    def write(self, rows: Any) -> None:  # noqa: ANN401 - a view of an array
        """Take all pixels."""
        self.rows = rows

    def seek(self, *_args: object) -> None:
        """Be a file to matplotlib."""


def drawn(figure: Any) -> bytes:  # noqa: ANN401 - a matplotlib Figure
    """Return a figure as PNG, without the margins around its contents."""
    buffer = io.BytesIO()
    try:
        save(figure, buffer)
    except Exception as error:
        error.add_note("The figure could not be drawn.")
        raise error.with_traceback(None) from None  # the frames are matplotlib's own
    return buffer.getvalue()


def save(figure: Any, buffer: io.BytesIO) -> None:  # noqa: ANN401 - a matplotlib Figure
    """Save a figure as PNG. With `bbox_inches="tight"` matplotlib would draw it twice, only to know its margins.

    So it is drawn once and then cropped, unless some of it is outside of its own area, where nothing is drawn.
    """
    settings: Any = sys.modules["matplotlib"].rcParams
    agg = sys.modules.get("matplotlib.backends.backend_agg")
    if settings["savefig.bbox"] == "tight" or agg is None or not isinstance(figure.canvas, agg.FigureCanvasAgg):
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return
    pixels = Pixels()
    figure.savefig(pixels, format="rgba")
    height, width, _ = pixels.rows.shape
    dpi = settings["savefig.dpi"]
    if dpi == "figure":
        dpi = getattr(figure, "_original_dpi", figure.dpi)
    box, pad = figure.get_tightbbox(), settings["savefig.pad_inches"]
    left, top, right, bottom = box.x0 * dpi, height - box.y1 * dpi, box.x1 * dpi, height - box.y0 * dpi
    if not (0 <= left <= right <= width and 0 <= top <= bottom <= height):
        figure.savefig(buffer, format="png", bbox_inches=box.padded(pad))
        return
    pad *= dpi
    area = (max(0, left - pad), max(0, top - pad), min(width, right + pad), min(height, bottom + pad))
    image = sys.modules["PIL.Image"].frombuffer("RGBA", (width, height), pixels.rows, "raw", "RGBA", 0, 1)
    image.crop(tuple(map(round, area))).save(buffer, "png", dpi=(dpi, dpi))


def among(figure: object, figures: list[Any]) -> bool:
    """Return whether a figure is in a list."""
    return any(figure is other for other in figures)


def managers() -> list[Any]:
    """Return the managers of all open figures."""
    found: list[Any] = sys.modules["matplotlib._pylab_helpers"].Gcf.get_all_fig_managers()
    return found


def ignore(*_args: object) -> None:
    """Configure nothing."""


def install(screen: Screen, imports: AfterImport) -> Figures:
    """Install the backend, and make `display` show figures."""
    figures = Figures(screen)
    sys.meta_path.insert(0, figures)
    imports.calls["matplotlib.backends.backend_agg"] = figures.adapt_agg
    imports.calls["matplotlib.figure"] = figures.adapt_saving
    imports.calls["matplotlib.ft2font"] = load_fonts
    ADAPTERS["matplotlib.figure", "Figure"] = figures.forms
    return figures
