"""Displayed values: sent to the agent by MIME type; images and figures become artifacts."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH123, PTH208

import base64
import os
import re
import socket
import sys
import threading
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.lib import pretty

from guest.places import OUTPUTS
from guest.protocol import MAX_BODY, encode, encode_json

FILE_TYPES = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "application/pdf": "pdf",
}
MAX_TEXT = 64 * 1024  # characters of one form of one value
PLAIN = {kind: pretty._type_pprinters[kind] for kind in (int, float, str)}  # noqa: SLF001 - they show what `repr` does
ACK_BYTES = 256  # more than an acknowledgement has; nothing else arrives during a run
EMPTY = ""  # what IPython sets `_` to at its start and after `%reset`
FIGURE_NAME = re.compile(r"figure-(\d+)\.")


class Screen:
    """Shows values through the socket to the agent and in numbered files."""

    def __init__(self) -> None:
        self.figures = 0  # highest number in use
        self.quiet = False  # the cell ends with a semicolon
        self._control: socket.socket | None = None
        self._pid = 0
        self._thread = threading.get_ident()
        self._run: object = None
        self._left = 0
        self._lock = threading.Lock()  # code may show values from its threads
        self._held = b""  # frames that go out with the next one

    def attach(self, control: socket.socket, figures: int) -> None:
        """Connect to the agent."""
        self._control, self.figures, self._pid = control, figures, os.getpid()

    def begin(self, run: object, max_bytes: int) -> None:
        """Begin a run that may show this much."""
        self._run, self._left = run, max_bytes

    def send(self, header: dict[str, Any], body: bytes = b"", *, hold: bool = False) -> None:
        """Send a frame to the agent; with `hold`, together with the next one. Never call it in a fork of the kernel."""
        if self._control is not None:
            with self._lock:
                self._held += encode(header, body)
                if not hold:
                    data, self._held = self._held, b""
                    self._control.sendall(data)

    def show(self, data: dict[str, Any], *, last: bool = False) -> None:
        """Show a value given by its forms. The last one of a cell is sent together with the cell's result."""
        if os.getpid() != self._pid:  # a fork by the user's code reaches the agent only through its output
            if self._pid:
                print(data.get("text/plain", ""))  # noqa: T201
            return
        files: list[str] = []
        forms: dict[str, str] = {}
        for mime, value in data.items():
            if mime in FILE_TYPES:
                files.append(self.save(as_bytes(value), FILE_TYPES[mime]))
            elif (form := as_text(mime, value)) is not None:
                forms[mime] = form
        sys.stdout.flush()
        sys.stderr.flush()
        body = encode_json(forms)
        if forms and len(body) > min(MAX_BODY, self._left):  # the plain form alone may still fit
            body = encode_json({"text/plain": forms.get("text/plain", "")})
        dropped = bool(forms) and len(body) > min(MAX_BODY, self._left)
        self._left -= 0 if dropped else len(body)
        wait = not last and threading.get_ident() == self._thread
        header = {"event": "display", "run": self._run, "files": files, "dropped": dropped, "wait": wait}
        self.send(header, b"{}" if dropped else body, hold=last)
        if wait and self._control is not None:  # until the agent has read all output so far
            self._control.recv(ACK_BYTES)

    def save(self, data: bytes, extension: str) -> str:
        """Write a file under the next free number; returns its path."""
        os.makedirs(OUTPUTS, exist_ok=True)
        if not self.figures:
            numbers = [int(found[1]) for name in os.listdir(OUTPUTS) if (found := FIGURE_NAME.match(name))]
            self.figures = max(numbers, default=0)
        while True:
            self.figures += 1
            path = f"{OUTPUTS}/figure-{self.figures}.{extension}"
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            return path


class Publisher(DisplayPublisher):  # type: ignore[misc]
    """Implements `display(…)`."""

    screen: Screen

    def publish(self, data: dict[str, Any], *_args: object, **_kwargs: object) -> None:
        """Show a value."""
        self.screen.show(data)

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing: output that was sent cannot be cleared."""


class Hook(DisplayHook):  # type: ignore[misc]
    """Python's displayhook: called with the value of a cell's last expression."""

    screen: Screen
    last: object = ""  # what `_` was set to

    def __call__(self, result: object = None) -> None:
        """Show the value and keep it as `_`, unless it is None or a semicolon suppresses it."""
        if result is None or self.screen.quiet:
            return
        data = self._forms(result)
        names = self.shell.user_ns
        if names.get("_", self.last) is self.last or names["_"] is EMPTY:  # not the user's own variable
            names["_"] = self.last = result
        if data:
            self.screen.show(data, last=True)

    def _forms(self, result: object) -> dict[str, Any]:
        """Return a value's forms by MIME type.

        Plain scalars have one; asking IPython for others would be most of the cost of a short cell.
        """
        formatter = self.shell.display_formatter
        kind = type(result)
        if kind in PLAIN and PLAIN[kind] is formatter.formatters["text/plain"].type_printers.get(kind):
            return {"text/plain": repr(result)}
        forms: dict[str, Any] = formatter.format(result)[0]
        return forms


def as_bytes(value: object) -> bytes:
    """Return the bytes of an image, which IPython gives as base64 (binary formats) or as text (SVG)."""
    if isinstance(value, bytes):
        return value
    text = str(value)
    return text.encode() if text.lstrip().startswith("<") else base64.b64decode(text)


def as_text(mime: str, value: object) -> str | None:
    """Return a form of a value as text, or None if it is too long to send."""
    text = value if isinstance(value, str) else encode_json(value).decode()
    if len(text) <= MAX_TEXT:
        return text
    if mime != "text/plain":
        return None  # half an HTML table or half a JSON document is useless
    return f"{text[:MAX_TEXT]}\n[… {len(text) - MAX_TEXT} characters left out; print or save the value …]"
