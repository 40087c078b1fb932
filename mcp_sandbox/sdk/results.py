"""The result of a run as programs and notebooks see it."""

import base64
import html
import re

from mcp_sandbox.views import ArtifactView, RunTimings, RunView, StreamView
from mcp_sandbox.views.text import readable

# Formats that browsers only draw. SVG can carry scripts.
SHOWN_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RunResult(RunView):
    """The result of a run. Code that fails is a normal result: look at `ok`, `error` and `exit_code`."""

    @property
    def ok(self) -> bool:
        """Whether the code ended without an error."""
        return self.status == "ok"

    @property
    def output(self) -> str:
        """What the code wrote to stdout, then the values that it displayed, as text. Images are among the artifacts."""
        values = [readable(display) for display in self.displays if not display.files]
        return "".join([_text(self.stdout), *(f"{value.rstrip()}\n" for value in values if value)])

    @property
    def metrics(self) -> RunTimings:
        """Where the time went, in milliseconds."""
        return self.timings

    def __str__(self) -> str:
        return self.output

    def _repr_html_(self) -> str:
        """Return the result for a notebook. Nothing of what the code wrote is taken as HTML."""
        error = "" if self.error is None else self.error.traceback or f"{self.error.name}: {self.error.message}"
        ending = "" if self.ok else f"{self.status}, {self.metrics.run_ms:,.0f} ms"
        return "".join(
            [
                _block(self.output),
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


def _image(mime_type: str, data: bytes) -> str:
    return f'<img src="data:{mime_type};base64,{base64.b64encode(data).decode()}">'


def _artifact(artifact: ArtifactView) -> str:
    return f"<div><code>{html.escape(artifact.path)}</code> {artifact.size:,} bytes</div>"
