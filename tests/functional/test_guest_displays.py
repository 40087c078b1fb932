"""What code shows, through a real agent and Python kernel: text for a model, one picture, and files."""

import json
import re
from collections.abc import AsyncIterator, Iterable

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, Chart, Display, Panel, Series
from tests.functional.guest_harness import Result, agent_client, run
from tests.waiting import HANG_S

WARM_UP = """import matplotlib
matplotlib.use("Agg")  # as the template does
import matplotlib.pyplot as plt, numpy, pandas"""
IMPORTS = "import matplotlib.pyplot as plt, numpy as np, pandas as pd\nfrom IPython.display import *"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client(WARM_UP) as client:
        yield client


@pytest.fixture(autouse=True)
async def limit(machine: AgentClient) -> AsyncIterator[None]:
    """Fail tests that hang; each begins without variables and artifacts."""
    with anyio.fail_after(HANG_S):
        await run(machine, f"%reset -f\n!mkdir -p /tmp/outputs; rm -rf /tmp/outputs/*\n{IMPORTS}")
        yield


def artifacts(result: Result) -> list[str]:
    return named(event.path for event in result.events if isinstance(event, Artifact))


def named(paths: Iterable[str]) -> list[str]:
    """Return the names of files without their numbers, which no two of a sandbox share."""
    return [re.sub(r"-\d+\.", "-N.", path.removeprefix("/tmp/outputs/")) for path in paths]


async def only(machine: AgentClient, code: str) -> Display:
    """Run code that shows one value."""
    result = await run(machine, code)
    assert (result.finished.status, len(result.displays)) == ("ok", 1), result.events
    return result.displays[0]


async def test_drawing_text_reads_no_files_and_fonts_know_their_own(machine: AgentClient):
    code = """
import os
from matplotlib.font_manager import findfont, get_font
plt.title("sphinx of black quartz"); plt.savefig("/tmp/plot.pdf"); plt.close("all")
opened = [os.path.realpath(file.path) for file in os.scandir("/proc/self/fd")]
path = findfont("DejaVu Sans")
print([file for file in opened if file.endswith(".ttf")], get_font(path).fname == path)
print(open("/tmp/plot.pdf", "rb").read(4))
"""
    result = await run(machine, code)
    assert result.stdout == "[] True\nb'%PDF'\n", result.events


async def test_a_large_font_stays_a_file(machine: AgentClient):
    code = """
import matplotlib.ft2font, shutil
from matplotlib.font_manager import findfont
path = "/tmp/large.ttf"
shutil.copy(findfont("DejaVu Sans"), path)
with open(path, "ab") as file: file.write(bytes(2 << 20))
font = matplotlib.ft2font.FT2Font(path)
font.set_text("quartz")
print(font.fname, font.get_num_glyphs())
"""
    result = await run(machine, code)
    assert result.stdout == "/tmp/large.ttf 6\n", result.events


SIZE = "from PIL import Image; import glob; print(Image.open(glob.glob('/tmp/outputs/figure-*.png')[0]).size)"
COUNT = """
import matplotlib.lines
draws, draw = [], matplotlib.lines.Line2D.draw
line, = plt.plot([1, 2])
line.draw = lambda renderer: (draws.append(1), draw(line, renderer))
plt.show()
print(len(draws))
"""


async def test_a_figure_is_drawn_once_and_has_no_margins(machine: AgentClient):
    assert (await run(machine, COUNT)).stdout == "1\n"
    width, height = json.loads((await run(machine, SIZE)).stdout.replace("(", "[").replace(")", "]"))
    assert 540 < width < 580  # of 640
    assert 400 < height < 430  # of 480


async def test_a_tall_picture_is_not_cut_off_at_its_top(machine: AgentClient):
    """Its width is not a whole number of pixels, so it says little about the resolution."""
    code = "figure = plt.figure(figsize=(1.999, 60)); figure.text(0.1, 0.999, 'HHH', va='top'); plt.show()"
    await run(machine, code)
    top = (
        "print(min(Image.open(glob.glob('/tmp/outputs/figure-*.png')[0]).convert('L').crop((0, 0, 200, 40)).getdata()))"
    )
    assert int((await run(machine, f"from PIL import Image; import glob; {top}")).stdout) < 128


@pytest.mark.parametrize("settings", ["", "plt.rcParams['savefig.bbox'] = 'tight'; "])
async def test_a_picture_has_what_is_outside_of_its_figure(machine: AgentClient, settings: str):
    await run(machine, f"{settings}plt.plot([1, 2]); plt.text(3, 1, 'outside'); plt.show()")
    width = int((await run(machine, SIZE)).stdout.strip("(\n").split(",")[0])
    await run(machine, "plt.rcdefaults()")
    assert width > 700


# -- one figure is one picture -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "plt.plot([1, 2]); plt.savefig('/tmp/outputs/own.png')",
        "plt.plot([1, 2]); plt.savefig('/tmp/outputs/own.png'); plt.show()",
        "plt.plot([1, 2]); plt.savefig('/tmp/outputs/own'); plt.close()",
        "import os; os.chdir('/tmp/outputs'); fig = plt.figure(); fig.savefig('own.jpg'); os.chdir('/workspace'); fig",
        "fig, ax = plt.subplots(); ax.plot([1, 2]); plt.show()\nfig",
        "fig, ax = plt.subplots(); ax.plot([1, 2]); display(fig)",
        "plt.savefig('/tmp/outputs/own.png'); plt.title('later'); plt.savefig('/tmp/outputs/own.png')",
        "from PIL import Image as PIL\nPIL.new('RGB', (9, 9), 'red')",
        "from PIL import Image as PIL\nim = PIL.new('L', (9, 9)); im.save('/tmp/outputs/own.png'); im",
    ],
)
async def test_a_figure_is_one_picture(machine, code):
    result = await run(machine, code)
    assert result.finished.status == "ok"
    assert len(artifacts(result)) == 1, result.events


async def test_a_figure_that_changed_after_it_was_saved_is_shown(machine):
    result = await run(machine, "plt.plot([1, 2]); plt.savefig('/tmp/outputs/own.png'); plt.title('new')")
    assert artifacts(result) == ["figure-N.png", "own.png"]
    assert result.shown == ['line chart "new"; series: 2 points']


async def test_an_image_that_changed_after_it_was_saved_is_shown(machine):
    code = "from PIL import Image as PIL\nim = PIL.new('L', (9, 9)); im.save('/tmp/outputs/own.png')"
    result = await run(machine, f"{code}; im.putpixel((1, 1), 9); im")
    assert artifacts(result) == ["figure-N.png", "own.png"]
    assert artifacts(await run(machine, "im.save('/workspace/own.png'); im")) == ["figure-N.png"]


async def test_a_figure_saved_as_pdf_or_elsewhere_is_shown_as_a_picture(machine):
    result = await run(machine, "plt.plot([1, 2]); plt.savefig('/tmp/outputs/own.pdf'); plt.savefig('own.png')")
    assert artifacts(result) == ["figure-N.png", "own.pdf"]


async def test_every_show_begins_a_new_figure_even_with_agg(machine):
    result = await run(machine, "plt.plot([1, 2]); plt.show()\nplt.plot([3]); plt.show()")
    assert result.shown == ["line chart; series: 2 points", "line chart; series: 1 point"]
    assert artifacts(result) == ["figure-N.png", "figure-N.png"]


@pytest.mark.parametrize("code", ["plt.plot([1])", "plt.gca()", "plt.subplots(2)[1]", "plt.title('x')"])
async def test_parts_of_a_figure_are_not_shown_besides_it(machine, code):
    assert len((await run(machine, code)).displays) == 1
    assert (await run(machine, "_ is not None")).shown == ["True"]


async def test_parts_of_a_figure_of_an_earlier_run_are_shown(machine):
    await run(machine, "ax = plt.subplots()[1]; ax.set_title('x'); plt.close()")
    assert (await run(machine, "ax")).shown == ["<Axes: title={'center': 'x'}>"]


@pytest.mark.parametrize("last", ["None", "plt.show()", "plt.gcf()", "display(plt.gcf())"])
async def test_a_figure_that_cannot_be_drawn_is_an_error_of_the_run(machine, last):
    result = await run(machine, f"plt.plot([1]); plt.title('$x^^2$')\n{last}")
    assert (result.finished.status, result.error.name, result.stderr) == ("error", "ValueError", "")
    assert "The figure could not be drawn." in result.error.traceback
    assert "mathtext" not in result.error.traceback  # no frames of matplotlib
    await run(machine, "plt.close('all')")


async def test_a_figure_that_cannot_be_drawn_neither_hides_others_nor_the_error_of_the_code(machine):
    result = await run(machine, "plt.figure(); plt.title('$x^^2$'); plt.figure(); plt.plot([1])")
    assert (result.error.name, artifacts(result)) == ("ValueError", ["figure-N.png"])
    assert (await run(machine, "plt.title('$x^^2$'); 1 / 0")).error.name == "ZeroDivisionError"


# -- charts ------------------------------------------------------------------------------------------------


async def test_a_figure_says_what_its_charts_show(machine):
    code = """fig, axs = plt.subplots(2, 2)
axs[0, 0].plot([1, 2, 3], label='2024'); axs[0, 0].plot([2, 3], label='2025'); axs[0, 0].legend()
axs[0, 0].set(title='Sales', xlabel='month', ylabel='EUR')
axs[0, 1].bar(['a', 'b'], [1, 2]); axs[1, 0].scatter([1, 2], [3, 4]); axs[1, 1].pie([1, 2], labels=['x', 'y'])
fig.suptitle('All')"""
    display = await only(machine, code)
    assert display.data["text/plain"].splitlines() == [
        '4 charts "All"',
        '1. line chart "Sales"; x: month; y: EUR; series: 2024 (3 points), 2025 (2 points)',
        "2. bar chart; series: 2 points",
        "3. scatter chart; series: 2 points",
        "4. pie chart; series: x, y",
    ]
    assert display.chart is not None
    first = Panel("Sales", "line", "month", "EUR", (Series("2024", 3), Series("2025", 2)))
    assert (display.chart.title, display.chart.charts[0], len(display.chart.charts)) == ("All", first, 4)


PLOTLY = {
    "data": [
        {"type": "scatter", "mode": "lines", "name": "a", "x": {"dtype": "f8", "bdata": "AAAAAAAA8D8AAAAAAAAAQA=="}},
        {"type": "bar", "name": "b", "y": [1, 2, 3]},
    ],
    "layout": {"title": {"text": "T"}, "xaxis": {"title": {"text": "day"}}, "yaxis": {"title": "EUR"}},
}
VEGA_LITE = {
    "data": {"name": "d"},
    "datasets": {"d": [{"x": 1, "y": 2, "c": "p"}, {"x": 2, "y": 2, "c": "q"}, {"x": 2, "y": 5, "c": "p"}]},
    "title": "T",
    "layer": [
        {
            "mark": {"type": "line"},
            "encoding": {
                "x": {"field": "x"},
                "y": {"aggregate": "mean", "field": "y"},
                "color": {"field": "c", "type": "nominal"},
            },
        }
    ],
}


@pytest.mark.parametrize(
    ("mime", "spec", "text"),
    [
        (
            "application/vnd.plotly.v1+json",
            PLOTLY,
            'line and bar chart "T"; x: day; y: EUR; series: a (2 points), b (3 points)',
        ),
        (
            "application/vnd.vegalite.v5+json",
            VEGA_LITE,
            'line chart "T"; x: x; y: mean(y); series: p (2 points), q (1 point)',
        ),
    ],
)
async def test_a_chart_says_what_its_specification_shows(machine, mime, spec, text):
    page = "<html><body><script>draw()</script></body></html>"
    display = await only(machine, f"display({{{mime!r}: {spec!r}, 'text/html': {page!r}}}, raw=True)")
    assert display.data["text/plain"] == text
    assert json.loads(display.data[mime]) == spec
    assert isinstance(display.chart, Chart)
    assert named(display.files) == ["display-N.html"]
    assert (await machine.read(display.files[0], limit=1000)).data == page.encode()


@pytest.mark.parametrize("spec", ["7", "None", "'['", "{'data': 7}", "{'data': [7], 'layout': []}"])
async def test_a_chart_that_makes_no_sense_is_shown_without_facts(machine, spec):
    display = await only(machine, f"display({{'application/vnd.plotly.v1+json': {spec}, 'text/plain': 'x'}}, raw=True)")
    assert (display.data["text/plain"], display.chart) == ("x", None)


async def test_a_library_that_shows_in_a_browser_shows_here(machine):
    library = """
import os, sys
os.makedirs('lib/plotly/io'); sys.path.insert(0, 'lib')
open('lib/plotly/__init__.py', 'w').close()
open('lib/plotly/basedatatypes.py', 'w').write('''
import plotly.io
class BaseFigure:
    def to_json(self): return '{"data": [], "layout": {"title": {"text": "T"}}}'
    def show(self, *args, **options): return plotly.io.show(self, *args, **options)
    def _ipython_display_(self): raise ValueError("no nbformat")
''')
open('lib/plotly/io/__init__.py', 'w').write('''
from ._renderers import show
def to_html(figure, **options): return "<html>plot</html>"
''')
open('lib/plotly/io/_renderers.py', 'w').write('def show(figure, renderer=None): raise ValueError(renderer)')
from plotly.basedatatypes import BaseFigure
figure = type('Figure', (BaseFigure,), {})()"""
    assert (await run(machine, library)).finished.status == "ok"
    for code in ("figure", "figure.show()", "display(figure)"):
        display = await only(machine, code)
        assert (display.data["text/plain"], display.data["text/html"]) == ('chart "T"', "<html>plot</html>")
    assert (await run(machine, "figure.show(renderer='browser')")).error.message == "browser"
    await run(machine, "!rm -r lib")


# -- other values ------------------------------------------------------------------------------------------


async def test_a_table_of_twelve_columns_is_not_wrapped(machine):
    table = "pd.DataFrame({f'a_rather_long_name_{n}': [n] for n in range(12)})"
    display = await only(machine, table)
    assert len(display.data["text/plain"].splitlines()) == 2
    assert display.files == ()
    wide = await only(machine, "pd.DataFrame(np.zeros((2, 1000)))")
    assert len(wide.data["text/plain"]) < 1000


# What a Styler of pandas looks like.
STYLER = """class Styler:
    def __repr__(self): return '<pandas.io.formats.style.Styler at 0x7f5ea92a5c10>'
    def _repr_html_(self): return '''<style type="text/css">#T_x { color: red }</style>
<table id="T_x"><thead><tr><th class="blank level0" >&nbsp;</th><th>price</th><th>n</th></tr></thead>
<tbody><tr><th id="T_x_level0_row0">0</th><td >1.50 EUR</td><td >1</td></tr>
<tr><th>1</th><td >20.00 EUR</td><td >2</td></tr></tbody></table>'''
Styler()"""


async def test_a_styled_table_is_text_and_a_file(machine):
    display = await only(machine, STYLER)
    assert display.data["text/plain"].splitlines() == ["       price  n", "0   1.50 EUR  1", "1  20.00 EUR  2"]
    assert "<table" in display.data["text/html"]
    assert named(display.files) == ["display-N.html"]


@pytest.mark.parametrize(
    ("code", "mime", "text"),
    [
        ("Markdown('# T')", "text/markdown", "# T"),
        ("Latex('$x^2$')", "text/latex", "$x^2$"),
        ("JSON({'a': [1]})", "application/json", '{"a":[1]}'),
        ("JSON({'a': float('nan')})", "application/json", "{'a': nan}"),
        ("HTML('<h1>T</h1><p>some <b>text</b><script>x()</script>')", "text/plain", "T\nsome text"),
        ("HTML('<script>x()</script>')", "text/plain", "(HTML with scripts, 20 characters)"),
        ("object.__new__(type('T', (), {}))", "text/plain", "<__main__.T at"),
    ],
)
async def test_a_value_has_text_that_a_model_can_use(machine, code, mime, text):
    display = await only(machine, code)
    if mime != "text/plain":
        assert display.data == {mime: text}
    assert text in display.data[mime]


async def test_svg_and_pdf_are_files_with_their_types(machine):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    display = await only(machine, f"SVG({svg!r})")
    assert (named(display.files), display.data) == (["figure-N.svg"], {"image/svg+xml": svg})
    display = await only(machine, "display({'application/pdf': b'%PDF', 'image/png': b'\\x89PNG'}, raw=True)")
    assert named(display.files) == ["figure-N.png", "figure-N.pdf"]


async def test_a_long_page_is_a_file_and_its_text_is_short(machine):
    display = await only(machine, "HTML('<p>short</p><script>' + 'x' * 300_000 + '</script>')")
    assert display.data == {"text/plain": "short"}
    assert (await machine.read(display.files[0], limit=100)).size > 300_000


async def test_an_animation_is_a_file(machine):
    code = """from matplotlib.animation import FuncAnimation
fig, ax = plt.subplots(); (line,) = ax.plot([0, 1])
page = HTML(FuncAnimation(fig, lambda n: line.set_ydata([0, n]), frames=2).to_jshtml()); plt.close()
page"""
    display = await only(machine, code)
    assert named(display.files) == ["display-N.html"]
    assert display.data["text/plain"].startswith("(HTML with scripts")


async def test_showing_nothing_of_use_shows_nothing(machine):
    result = await run(machine, "display({'application/vnd.bokehjs_load.v0+json': '', 'text/html': 'logo'}, raw=True)")
    assert (result.finished.status, result.displays) == ("ok", [])
