"""What a chart shows, as facts: its type, title, axes and series. From the specifications that libraries give.

A chart is a dictionary: `type`, `title`, `x_label`, `y_label` and `series`, each with a `label` and its number of
`points` or None. A figure with several charts has `title` and `charts`. Texts may be empty. Code can change any object
that is read here, so nothing in it has to be what it should be, and all of it is bounded.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from guest.forms import PLOTLY, VEGA_LITE

MAX_CHARTS = 20  # of one figure
MAX_SERIES = 20  # of one chart
MAX_LABEL = 120  # characters
GROUPS = ("layer", "hconcat", "vconcat", "concat")  # of vega-lite

Chart = dict[str, Any]


def describe(chart: Chart) -> str:
    """Return a chart as one line, or as one line for each of several."""
    if "charts" in chart:
        title = f' "{chart["title"]}"' if chart.get("title") else ""
        lines = [f"{n}. {_line(part)}" for n, part in enumerate(chart["charts"], 1)]
        return "\n".join([f"{len(lines)} charts{title}", *lines])
    return _line(chart)


def _line(chart: Chart) -> str:
    kind = chart.get("type") or ""
    title = f' "{chart["title"]}"' if chart.get("title") else ""
    parts = [f"{f'{kind} chart' if kind else 'chart'}{title}"]
    parts += [f"{axis}: {chart[key]}" for axis, key in (("x", "x_label"), ("y", "y_label")) if chart.get(key)]
    if series := chart.get("series"):
        parts.append(f"series: {_listed(series)}")
    return "; ".join(parts)


def _listed(series: list[dict[str, Any]]) -> str:
    labels, counts = ([one[key] for one in series] for key in ("label", "points"))
    if len(series) > 1 and all(labels) and counts[0] is not None and len(set(counts)) == 1:
        return f"{', '.join(labels)} ({_points(counts[0])} each)"
    return ", ".join(
        f"{label} ({_points(count)})" if label and count is not None else label or _points(count) or "unnamed"
        for label, count in zip(labels, counts, strict=True)
    )


def _points(count: int | None) -> str:
    return "" if count is None else f"{count} point{'s' * (count != 1)}"


def make(kind: str, title: object, x: object, y: object, series: Iterable[tuple[object, int | None]]) -> Chart:
    """Return the facts of one chart."""
    listed = [{"label": text(label), "points": points} for label, points in series]
    return {"type": kind, "title": text(title), "x_label": text(x), "y_label": text(y), "series": listed[:MAX_SERIES]}


def several(title: object, charts: list[Chart]) -> Chart | None:
    """Return several charts as one, or the only one with the title of all, or None."""
    if len(charts) > 1:
        return {"title": text(title), "charts": charts[:MAX_CHARTS]}
    return {**charts[0], "title": charts[0]["title"] or text(title)} if charts else None


def text(value: object) -> str:
    """Return a label on one line; a library may give a list of lines, or an object that has the text."""
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value[:9]))
    return " ".join(str(value).split())[:MAX_LABEL] if value is not None else ""


def facts_of(chart: Any, read: Callable[[Any], Chart | None]) -> Chart | None:  # noqa: ANN401 - whatever a library has
    """Return what `read` finds out about a chart; None if that fails, because it can be shown nevertheless."""
    try:
        return read(chart)
    except Exception:  # code can have done anything to it
        return None


def chart_of(data: dict[str, Any]) -> Chart | None:
    """Return the facts of a chart by its specification among the forms of a value; None if there is none."""
    for mime in (PLOTLY, *VEGA_LITE):
        if (spec := data.get(mime)) is not None:
            read = plotly_chart if mime == PLOTLY else vega_chart
            return facts_of(spec, lambda spec: read(json.loads(spec) if isinstance(spec, str) else spec))  # noqa: B023
    return None


# ---------------------------------------------------------------- matplotlib


def matplotlib_chart(figure: Any) -> Chart | None:  # noqa: ANN401 - a matplotlib Figure
    """Return the facts of a figure."""
    suptitle = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    return several(
        suptitle, [_axes(axes) for axes in figure.axes if axes.get_label() != "<colorbar>"][: MAX_CHARTS + 1]
    )


def _axes(axes: Any) -> Chart:  # noqa: ANN401 - matplotlib Axes
    kind, series = _drawn(axes)
    title = axes.get_title() or axes.get_title("left")
    named = [("" if str(name).startswith("_") else name, points) for name, points in series]
    return make(kind, title, axes.get_xlabel(), axes.get_ylabel(), named)


def _drawn(axes: Any) -> tuple[str, list[tuple[object, int | None]]]:  # noqa: ANN401 - matplotlib Axes
    """Return the type of what is drawn first in this order, and the series of that type."""
    bars = [box for box in axes.containers if type(box).__name__ == "BarContainer"]
    if bars:
        return "bar", [(box.get_label(), len(box.patches)) for box in bars]
    wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
    if wedges:
        labels = [patch.get_label() for patch in wedges if not patch.get_label().startswith("_")]
        return "pie", [(label, None) for label in labels if label] or [("", len(wedges))]
    points = [dots for dots in axes.collections if type(dots).__name__ == "PathCollection"]
    if points and not axes.lines:
        return "scatter", [(dots.get_label(), len(dots.get_offsets())) for dots in points]
    if axes.lines:
        return "line", [(line.get_label(), len(line.get_xdata(orig=False))) for line in axes.lines]
    if axes.images:
        shape = " x ".join(map(str, axes.images[0].get_array().shape[:2]))
        return "image", [(f"{shape} pixels", None)]
    others = {type(drawn).__name__: drawn for drawn in axes.collections}
    kinds = {
        "QuadMesh": "heatmap",
        "PolyCollection": "area",
        "FillBetweenPolyCollection": "area",
        "QuadContourSet": "contour",
    }
    return next((kinds[name] for name in others if name in kinds), ""), []


# ---------------------------------------------------------------- plotly


def plotly_chart(spec: dict[str, Any]) -> Chart | None:
    """Return the facts of a plotly figure."""
    layout = spec.get("layout") or {}
    traces = spec.get("data") or []
    kinds = list(dict.fromkeys(map(_trace_kind, traces)))
    series = [(trace.get("name"), _trace_points(trace)) for trace in traces[:MAX_SERIES]]
    x, y = ((layout.get(axis) or {}).get("title") for axis in ("xaxis", "yaxis"))
    return make(" and ".join(kinds[:3]), layout.get("title"), x, y, series)


def _trace_kind(trace: dict[str, Any]) -> str:
    kind = str(trace.get("type") or "scatter")[:MAX_LABEL]
    return "line" if kind in ("scatter", "scattergl") and "lines" in str(trace.get("mode") or "lines") else kind


def _trace_points(trace: dict[str, Any]) -> int | None:
    lengths = (length(trace.get(name)) for name in ("x", "y", "values", "z", "r", "lat", "locations", "open"))
    return next((found for found in lengths if found is not None), None)


def length(values: object) -> int | None:
    """Return the length of an array, which plotly may write as base64."""
    if isinstance(values, dict) and isinstance(values.get("bdata"), str):
        size = int(str(values.get("dtype"))[-1])  # bytes of one value: f8, i4, u1
        return len(values["bdata"]) * 3 // 4 // size
    return len(values) if hasattr(values, "__len__") and not isinstance(values, (str, dict)) else None


# ---------------------------------------------------------------- vega-lite (altair)


def vega_chart(spec: dict[str, Any]) -> Chart | None:
    """Return the facts of a vega-lite chart."""
    return several(spec.get("title"), list(_views(spec, spec.get("datasets") or {}, {}, None))[: MAX_CHARTS + 1])


def _views(spec: dict[str, Any], datasets: dict[str, Any], encoding: dict[str, Any], data: Any) -> Iterable[Chart]:  # noqa: ANN401 - JSON
    data, encoding = spec.get("data") or data, {**encoding, **(spec.get("encoding") or {})}
    for group in GROUPS:
        for part in (spec.get(group) or [])[: MAX_CHARTS + 1]:
            yield from _views(part, datasets, encoding, data)
    if isinstance(spec.get("spec"), dict):  # of a facet or a repetition
        yield from _views(spec["spec"], datasets, encoding, data)
    if "mark" in spec:
        mark = spec["mark"]
        kind = mark.get("type") if isinstance(mark, dict) else mark
        x, y = (_channel(encoding.get(axis)) for axis in ("x", "y"))
        yield make(text(kind), spec.get("title"), x, y, _vega_series(_rows(data, datasets), encoding))


def _channel(channel: Any) -> str:  # noqa: ANN401 - JSON
    if not isinstance(channel, dict):
        return ""
    title = channel.get("title") or (channel.get("axis") or {}).get("title")
    field, aggregate = channel.get("field"), channel.get("aggregate")
    return text(title or (f"{aggregate}({text(field)})" if aggregate else field))


def _rows(data: Any, datasets: dict[str, Any]) -> list[Any]:  # noqa: ANN401 - JSON
    data = data or {}
    rows = data.get("values") or datasets.get(str(data.get("name"))) or []
    return rows if isinstance(rows, list) else []


def _vega_series(rows: list[Any], encoding: dict[str, Any]) -> list[tuple[object, int | None]]:
    field = next(
        (
            channel["field"]
            for name in ("color", "detail", "shape", "strokeDash")
            if isinstance(channel := encoding.get(name), dict) and "field" in channel
        ),
        None,
    )
    counts: dict[object, int] = {}
    for row in rows:
        label = text(row.get(field)) if field else None
        counts[label] = counts.get(label, 0) + 1
    return list(counts.items())


# ---------------------------------------------------------------- bokeh


def bokeh_chart(model: Any) -> Chart | None:  # noqa: ANN401 - a bokeh model
    """Return the facts of a bokeh plot, or of all plots in a layout."""
    roots = model if isinstance(model, (list, tuple)) else [model]
    found = [part for root in roots for part in root.references()]
    plots = [part for part in found if hasattr(part, "renderers") and hasattr(part, "xaxis")]
    return several("", [_plot(plot) for plot in plots[: MAX_CHARTS + 1]])


def _plot(plot: Any) -> Chart:  # noqa: ANN401 - a bokeh figure
    labels = {id(drawn): item.label for legend in plot.legend for item in legend.items for drawn in item.renderers}
    glyphs = [drawn for drawn in plot.renderers if hasattr(drawn, "glyph")]
    kinds = dict.fromkeys(type(drawn.glyph).__name__ for drawn in glyphs)
    series = [(getattr(labels.get(id(drawn)), "value", drawn.name), _source_rows(drawn)) for drawn in glyphs]
    x, y = (axis[0].axis_label if axis else None for axis in (plot.xaxis, plot.yaxis))
    return make(" and ".join(kinds).lower()[:MAX_LABEL], getattr(plot.title, "text", plot.title), x, y, series)


def _source_rows(drawn: Any) -> int | None:  # noqa: ANN401 - a bokeh renderer
    return max(map(len, drawn.data_source.data.values()), default=0)
