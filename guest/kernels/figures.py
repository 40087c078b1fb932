"""Matplotlib without a window: every figure becomes one PNG file, whether it is shown or left open.

Replaces the module `matplotlib_inline.backend_inline` in the kernel, which matplotlib loads by default and for
`%matplotlib inline`. The original draws a figure that is left open three times, this one twice; and it does not see
figures of code that chose `Agg`. Nothing here imports matplotlib unless the code does.
"""

import io
import sys
import traceback
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from guest.kernels.display import Screen

BACKEND = "matplotlib_inline.backend_inline"


class Figures(Loader, MetaPathFinder):
    """Loads itself as matplotlib's backend module and tracks what a cell has shown."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._shown: list[object] = []  # figures that this cell has shown already

    def find_spec(self, fullname: str, *_args: object) -> ModuleSpec | None:
        """Find the backend module, for Python's import system."""
        return ModuleSpec(fullname, self) if fullname == BACKEND else None

    def exec_module(self, module: ModuleType) -> None:
        """Define what matplotlib expects of a backend."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        contents = {"FigureCanvas": FigureCanvasAgg, "show": self.show, "configure_inline_support": ignore}
        vars(module).update(contents)

    def show(self, *_args: object, **_kwargs: object) -> None:
        """Save all open figures and close them: `plt.show()`."""
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        try:
            for manager in managers():
                figure = manager.canvas.figure
                if all(figure is not shown for shown in self._shown):
                    self._screen.show({"image/png": self.render(figure), "text/plain": repr(figure)})
        finally:
            pyplot.close("all")

    def render(self, figure: Any) -> bytes:  # noqa: ANN401 - a matplotlib Figure
        """Return a figure as PNG."""
        self._shown.append(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()

    def end_cell(self) -> None:
        """Save the figures that a cell has left open."""
        if "matplotlib._pylab_helpers" not in sys.modules:
            return
        try:
            if managers():
                self.show()
        except Exception:  # a figure that cannot be drawn is an error of the user's code
            traceback.print_exc()
        self._shown.clear()


def managers() -> list[Any]:
    """Return the managers of all open figures."""
    found: list[Any] = sys.modules["matplotlib._pylab_helpers"].Gcf.get_all_fig_managers()
    return found


def ignore(*_args: object) -> None:
    """Configure nothing."""


def install(shell: Any, screen: Screen) -> Figures:  # noqa: ANN401 - IPython's shell
    """Install the backend, and make `display` show figures."""
    figures = Figures(screen)
    sys.meta_path.insert(0, figures)
    png = shell.display_formatter.formatters["image/png"]
    png.for_type_by_name("matplotlib.figure", "Figure", figures.render)
    return figures
