"""Adapts libraries that show things: what their objects look like here, and what happens after their import.

Nothing here imports a library: code does, and only then is it adapted.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from IPython.core.formatters import DisplayFormatter

from guest.forms import CHART, PLOTLY
from guest.kernels.charts import bokeh_chart, facts_of

MAX_COLUMNS = 24  # of a table; of more, the first and last ones are shown
MAX_WIDTH = 240  # characters of a table of polars, which would wrap the cells of a wider one
MAX_LAYERS = 10  # kinds of layers of a map that are named

Bundle = dict[str, Any]
Adapter = Callable[[Any], Bundle]


class Formatter(DisplayFormatter):  # type: ignore[misc]
    """Asks for an adapter first. Unlike IPython's own formatters, one that fails ends the code with its error."""

    def format(self, obj: object, include: Any = None, exclude: Any = None) -> tuple[Bundle, Bundle]:  # noqa: ANN401
        """Return the forms of a value by MIME type, and what IPython knows about them."""
        for kind in type(obj).__mro__:
            if (adapter := ADAPTERS.get((kind.__module__, kind.__name__))) is not None:
                return adapter(obj), {}
        forms: tuple[Bundle, Bundle] = super().format(obj, include=include, exclude=exclude)
        return forms


# ---------------------------------------------------------------- what objects look like


def altair_bundle(chart: Any) -> Bundle:  # noqa: ANN401 - an altair chart
    """Return a chart as its specification and as a page."""
    spec = chart.to_dict()
    version = str(spec.get("$schema", "")).rpartition("/v")[2].partition(".")[0] or "5"
    return {f"application/vnd.vegalite.v{version}+json": spec, "text/html": chart.to_html()}


def plotly_bundle(figure: Any) -> Bundle:  # noqa: ANN401 - a plotly figure or its dictionary
    """Return a figure as its specification and as a page."""
    html = sys.modules["plotly.io"].to_html(figure, include_plotlyjs="cdn", validate=False)
    spec = figure if isinstance(figure, dict) else figure.to_json()
    return {PLOTLY: spec, "text/html": html}


def bokeh_bundle(model: Any) -> Bundle:  # noqa: ANN401 - a bokeh model
    """Return a plot or a layout as its facts and as a page."""
    embed, resources = import_module("bokeh.embed"), import_module("bokeh.resources")
    return {CHART: facts_of(model, bokeh_chart), "text/html": embed.file_html(model, resources.CDN)}


def folium_bundle(chart: Any) -> Bundle:  # noqa: ANN401 - a folium Map
    """Return a map as a page, and what is on it."""
    from collections import Counter

    layers = Counter(type(child).__name__ for child in chart._children.values())  # noqa: SLF001 - there is no other way
    named = ", ".join(f"{count} {name}" for name, count in layers.most_common(MAX_LAYERS))
    place, zoom = getattr(chart, "location", None), getattr(chart, "options", {}).get("zoom")
    return {"text/plain": f"map around {place}, zoom {zoom}, with {named}", "text/html": chart.get_root().render()}


ADAPTERS: dict[tuple[str, str], Adapter] = {
    **{(f"altair.vegalite.v{version}.api", "TopLevelMixin"): altair_bundle for version in (4, 5, 6)},
    ("plotly.basedatatypes", "BaseFigure"): plotly_bundle,
    ("bokeh.models.ui.ui_element", "UIElement"): bokeh_bundle,
    ("folium.folium", "Map"): folium_bundle,
}


# ---------------------------------------------------------------- after their import


class AfterImport(MetaPathFinder):
    """Calls a function with a module that code has just imported."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[Any], None]] = {"pandas": widen_tables}

    def find_spec(self, fullname: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Find a module as Python does, and prepare the call, for Python's import system."""
        call = self.calls.get(fullname)
        spec = PathFinder.find_spec(fullname, path) if call else None
        if call is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            call(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def widen_tables(pandas: Any) -> None:  # noqa: ANN401 - the module
    """Print whole rows: a reader without a screen cannot put the pieces of a table together."""
    pandas.set_option("display.expand_frame_repr", False)
    pandas.set_option("display.max_columns", MAX_COLUMNS)


def show_with(show: Callable[[Bundle], None], bundle: Adapter) -> Callable[[Any], None]:
    """Return a function that makes a library's own `show` show figures here, unless it is told to do otherwise."""

    def replace(module: Any) -> None:  # noqa: ANN401 - the module
        original = module.show

        def show_figure(figure: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the library has it
            return original(figure, *args, **options) if args or "renderer" in options else show(bundle(figure))

        module.show = show_figure

    return replace


def install(show: Callable[[Bundle], None]) -> AfterImport:
    """Adapt libraries that are imported from now on; `show` shows what their own functions show."""
    finder = AfterImport()
    finder.calls["plotly.io._renderers"] = show_with(show, plotly_bundle)
    finder.calls["bokeh.io.showing"] = show_with(show, bokeh_bundle)
    sys.meta_path.insert(0, finder)
    return finder
