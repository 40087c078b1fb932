"""Displayed values: sent to the agent by MIME type; pictures, and what is better read as a file, become artifacts."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH123, PTH208

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.lib import pretty

from guest.forms import PICTURES, PLAIN
from guest.kernels.forms import prepare
from guest.places import OUTPUTS
from guest.protocol import MAX_BODY, encode, encode_json

SCALARS = {kind: pretty._type_pprinters[kind] for kind in (int, float, str)}  # noqa: SLF001 - they show what `repr` does
ACK_BYTES = 256  # more than an acknowledgement has; nothing else arrives during a run
EMPTY = ""  # what IPython sets `_` to at its start and after `%reset`
DRAWN = (*PICTURES.values(), "svg", "pdf")  # extensions of figures
NUMBERED = re.compile(r"(?:figure|display)-(\d+)\.")


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
        forms, contents = prepare(data)
        files = self.save(contents) if contents and self._run else []  # run 0 leaves no files
        if not forms and not files:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        body = encode_json(forms)
        if len(body) > min(MAX_BODY, self._left):  # the plain form alone may still fit
            forms = {mime: form for mime, form in forms.items() if mime == PLAIN}
            body = encode_json(forms)
        dropped = bool(forms) and len(body) > min(MAX_BODY, self._left)
        self._left -= 0 if dropped else len(body)
        wait = not last and threading.get_ident() == self._thread
        header = {"event": "display", "run": self._run, "files": files, "dropped": dropped, "wait": wait}
        self.send(header, b"{}" if dropped else body, hold=last)
        if wait and self._control is not None:  # until the agent has read all output so far
            self._control.recv(ACK_BYTES)

    def save(self, contents: dict[str, bytes]) -> list[str]:
        """Write the files of a value, given by extension, under the next free number; returns their paths."""
        os.makedirs(OUTPUTS, exist_ok=True)
        if not self.figures:
            numbers = [int(found[1]) for name in os.listdir(OUTPUTS) if (found := NUMBERED.match(name))]
            self.figures = max(numbers, default=0)
        name = "figure" if any(extension in DRAWN for extension in contents) else "display"
        while True:
            self.figures += 1
            paths = [f"{OUTPUTS}/{name}-{self.figures}.{extension}" for extension in contents]
            if any(map(os.path.lexists, paths)):
                continue
            for path, data in zip(paths, contents.values(), strict=True):
                with open(path, "xb") as file:
                    file.write(data)
            return paths


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
    is_part: Callable[[object], bool]  # of a figure that is shown anyway
    last: object = ""  # what `_` was set to

    def __call__(self, result: object = None) -> None:
        """Show the value and keep it as `_`, unless it is None or a semicolon suppresses it."""
        if result is None or self.screen.quiet:
            return
        data = {} if self.is_part(result) else self._forms(result)
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
        if kind in SCALARS and SCALARS[kind] is formatter.formatters["text/plain"].type_printers.get(kind):
            return {"text/plain": repr(result)}
        forms: dict[str, Any] = formatter.format(result)[0]
        return forms
