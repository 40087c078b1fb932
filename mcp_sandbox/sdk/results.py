"""The result of a run as programs and notebooks see it."""

import base64
import html
import re
from dataclasses import dataclass
from functools import cached_property

from guest.client.messages import Chart, Display
from guest.forms import HTML, PLAIN, PLOTLY, SVG, VEGA_LITE
from mcp_sandbox.views import ArtifactView, ImageView, RunTimings, RunView, StreamView
from mcp_sandbox.views.text import readable

# Formats that browsers only draw. SVG can carry scripts.
SHOWN_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
MAX_FRAME_EM = 30  # height of a frame in a notebook; a table of few rows has less
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Shown:
    """A value that the code has displayed. A form that it does not have is None.

    Forms that are too long to travel with the result are files: `files` has their paths in the sandbox.
    """

    display: Display
    images: tuple[ImageView, ...]

    @property
    def text(self) -> str:
        """The value as text that a model can read; empty if it has none."""
        return readable(self.display)

    @property
    def plain(self) -> str | None:
        """Plain text."""
        return self.display.data.get(PLAIN)

    @property
    def html(self) -> str | None:
        """HTML, as the code wrote it: do not trust it."""
        return self.display.data.get(HTML)

    @property
    def markdown(self) -> str | None:
        """Markdown."""
        return self.display.data.get("text/markdown")

    @property
    def latex(self) -> str | None:
        """LaTeX."""
        return self.display.data.get("text/latex")

    @property
    def json(self) -> str | None:
        """JSON, not parsed."""
        return self.display.data.get("application/json")

    @property
    def javascript(self) -> str | None:
        """JavaScript."""
        return self.display.data.get("application/javascript")

    @property
    def svg(self) -> str | None:
        """An image as SVG."""
        return self.display.data.get(SVG)

    @property
    def plotly(self) -> str | None:
        """The specification of a plotly figure, JSON."""
        return self.display.data.get(PLOTLY)

    @property
    def vega_lite(self) -> str | None:
        """The specification of an altair chart, JSON."""
        return next((self.display.data[mime] for mime in VEGA_LITE if mime in self.display.data), None)

    @property
    def png(self) -> bytes | None:
        """An image as PNG, if the result has it: only the first few images of a run travel with it."""
        return self._image("image/png")

    @property
    def jpeg(self) -> bytes | None:
        """An image as JPEG."""
        return self._image("image/jpeg")

    @property
    def chart(self) -> Chart | None:
        """What a chart shows: its type, title, axes and series."""
        return self.display.chart

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the value in the sandbox, which `read_artifact` reads."""
        return self.display.files

    def _image(self, mime_type: str) -> bytes | None:
        return next((image.data for image in self.images if image.mime_type == mime_type), None)


class RunResult(RunView):
    """The result of a run. Code that fails is a normal result: look at `ok`, `error` and `exit_code`."""

    @property
    def ok(self) -> bool:
        """Whether the code ended without an error."""
        return self.status == "ok"

    @property
    def output(self) -> str:
        """What the code wrote to stdout, then the values that it displayed, as text. Images are among the artifacts."""
        values = map(readable, self.displays)
        return "".join([_text(self.stdout), *(f"{value.rstrip()}\n" for value in values if value)])

    @cached_property
    def results(self) -> tuple[Shown, ...]:
        """The values that the code displayed, in order, with their forms."""
        return tuple(
            Shown(display, tuple(image for image in self.images if image.path in display.files))
            for display in self.displays
        )

    @property
    def result(self) -> Shown | None:
        """The last of them: the value of the last expression, if it has one."""
        return self.results[-1] if self.results else None

    @property
    def metrics(self) -> RunTimings:
        """Where the time went, in milliseconds."""
        return self.timings

    def __str__(self) -> str:
        return self.output

    def _repr_html_(self) -> str:
        """Return the result for a notebook.

        Text of the code is escaped. Its HTML is shown in a frame with an origin of its own, which cannot reach the
        notebook.
        """
        error = "" if self.error is None else self.error.traceback or f"{self.error.name}: {self.error.message}"
        ending = "" if self.ok else f"{self.status}, {self.metrics.run_ms:,.0f} ms"
        return "".join(
            [
                _block(_text(self.stdout)),
                *map(_shown, self.results),
                _block(_text(self.stderr), "#a60"),
                _block(error, "#c00"),
                *(_image(image.mime_type, image.data) for image in self.images if image.mime_type in SHOWN_IMAGES),
                *map(_artifact, self.artifacts),
                _block(ending, "#888"),
            ]
        )


def _text(stream: StreamView) -> str:
    gap = f"\n[… {stream.omitted_bytes:,} bytes omitted …]\n" if stream.omitted_bytes else ""
    return f"{stream.head}{gap}{stream.tail}"


def _block(text: str, colour: str = "inherit") -> str:
    shown = html.escape(_COLOURS.sub("", text))
    return f'<pre style="color:{colour}">{shown}</pre>' if shown else ""


def _shown(value: Shown) -> str:
    if value.html is not None:
        return _frame(value.html)
    if value.svg is not None:
        return _image(SVG, value.svg.encode())  # an image runs no scripts
    return _block(value.text)


def _frame(page: str) -> str:
    """Return HTML of the code in a frame. Scripts run in it, but as a stranger to the notebook and its server."""
    rows = page.count("<tr")
    height = MAX_FRAME_EM if "<script" in page or not rows else min(MAX_FRAME_EM, 4 + 2 * rows)
    style = f"width:100%;height:{height}em;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def _image(mime_type: str, data: bytes) -> str:
    return f'<img src="data:{mime_type};base64,{base64.b64encode(data).decode()}">'


def _artifact(artifact: ArtifactView) -> str:
    return f"<div><code>{html.escape(artifact.path)}</code> {artifact.size:,} bytes</div>"
