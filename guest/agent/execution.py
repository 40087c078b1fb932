"""One run as the agent sees it: its limits, its output, its result."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103

import os
from collections.abc import Callable
from typing import Any

from guest.agent.loop import Loop
from guest.agent.output import Capture
from guest.agent.run_processes import RunProcesses
from guest.agent.stdin import OpenInput
from guest.agent.user import User
from guest.errors import RequestRefused
from guest.places import OUTPUTS
from guest.processes import signal_name
from guest.protocol import MAX_BODY, MAX_DISPLAYS, split_code

MAX_HEAD = 16 * 1024 * 1024  # bytes of each stream sent live, whatever the host asks for
MAX_DISPLAY = 16 * 1024 * 1024  # bytes of all displays of a run, whatever the host asks for
MAX_GRACE_MS = 60_000
MAX_FILES = 8  # of one display; a value has no more forms that are files
MAX_NAME = 255  # characters; even with all of them escaped a display fits into a header
MAX_REPORT = 512 * 1024  # bytes
MAX_SIGNAL = 20  # characters; more than any name has
KINDS = ("code", "command", "invoke")
LEFT = "mcp-sandbox: processes that this run left running were ended: {}.{}\n"
TO_KEEP = " To keep them, pass keep_processes=true."  # a handler cannot: a call of a function leaves nothing
NO_FORMS = b"{}"  # the body of a display that has only files, or whose text was dropped

Send = Callable[[dict[str, Any], bytes], None]


class Execution:
    """Collects the output and the result of one run and sends them to the host."""

    def __init__(self, header: dict[str, Any], code: bytes, number: int, user: User, send: Send) -> None:
        """Read the limits of a run. Raises RequestRefused, KeyError, TypeError or ValueError."""
        self.request = header["id"]
        self.code = code
        self.number = number
        self.grace_s = _whole(header, "grace_ms", MAX_GRACE_MS) / 1000
        self.max_display_bytes = _whole(header, "max_display_bytes", MAX_DISPLAY)
        self.kind = header.get("kind", "code")
        if self.kind not in KINDS:
            raise RequestRefused("bad_request", f"kind is none of {', '.join(KINDS)}")
        self.keep_processes = header.get("keep_processes") is True  # what it leaves running outlives it
        # See `split_code`.
        self._code_bytes = _whole(header, "code_bytes", MAX_BODY) if "code_bytes" in header else None
        self.stdin_open = header.get("stdin_open") is True  # the host sends input while it is active
        self.stdin: OpenInput | None = None  # then
        self.begun = False  # a kernel has the code
        self.kernel_lost = False  # the kernel died while this command ran
        self.over_memory = ""  # why its processes were ended, if the machine had no memory left
        self._reported = False
        self.stopped = False
        self._send = send
        self._user = user
        self._display_left = self.max_display_bytes
        self._displays_left = MAX_DISPLAYS
        self._dropped = 0
        self._head = _whole(header, "head_bytes", MAX_HEAD)
        self._tail = _whole(header, "tail_bytes", MAX_BODY)
        self._captures: dict[str, Capture] = {}  # created with the first output

    def _capture(self, stream: str) -> Capture:
        def send(data: bytes, gap: int) -> None:
            header: dict[str, Any] = {"event": "output", "stream": stream}
            if gap:
                header["gap"] = gap
            self._send(header, data)

        def open_spill() -> tuple[int, str]:
            path = f"{OUTPUTS}/run-{self.number}-{stream}.txt"
            with self._user.acting():
                os.makedirs(OUTPUTS, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                return os.open(path, flags, 0o644), path

        return Capture(self._head, self._tail, send, open_spill)

    @property
    def rehearsed(self) -> bool:
        """Whether it must leave no trace: no owner has asked for it."""
        return self.number == 0

    def order(self) -> dict[str, Any]:
        """Return what a kernel gets besides the code."""
        order: dict[str, Any] = {"op": "run", "run": self.number, "max_display_bytes": self.max_display_bytes}
        if self._code_bytes is not None:
            order.update(kind=self.kind, code_bytes=self._code_bytes)
        if self.stdin is not None:
            order["stdin"] = self.stdin.path
        return order

    def open_stdin(self, loop: Loop) -> None:
        """Let the host send input, if it wants to. Raises RequestRefused."""
        if self.stdin_open:
            try:
                self.stdin = OpenInput(loop, self._user, self._open_window)
            except OSError as error:
                raise RequestRefused("no_kernel", f"no standard input can be opened: {error.strerror}") from error

    def _open_window(self, size: int) -> None:
        self._send({"event": "window", "bytes": size}, b"")

    def close_stdin(self) -> None:
        """Take no more input."""
        if self.stdin is not None:
            self.stdin.close()
            self.stdin = None

    def split(self) -> tuple[str, dict[str, Any]]:
        """Return the code and its options. Raises ProtocolError."""
        return split_code(self.code, self._code_bytes)

    @property
    def spills(self) -> set[str]:
        """The files in which it keeps its output."""
        return {capture.spilled for capture in self._captures.values() if capture.spilled}

    def feed(self, stream: str, data: bytes) -> None:
        """Add output of the code."""
        capture = self._captures.get(stream)
        if capture is None:
            capture = self._captures[stream] = self._capture(stream)
        capture.feed(data)

    def display(self, header: dict[str, Any], body: bytes) -> None:
        """Send a value that the code shows."""
        files = header.get("files")
        names = _short_names(files[:MAX_FILES]) if type(files) is list else []
        cost = 0 if body == NO_FORMS else len(body)
        if header.get("dropped") is True or cost > self._display_left or not self._displays_left:
            self._dropped += 1
            body, cost = NO_FORMS, 0
        if (cost or names) and self._displays_left:
            self._display_left -= cost
            self._displays_left -= 1
            self._send({"event": "display", "files": names}, body)

    def report(self, body: bytes) -> None:
        """Send what the kernel has measured, as JSON; only the first report counts."""
        if not self._reported and len(body) <= MAX_REPORT:
            self._reported = True
            self._send({"event": "report"}, body)

    def ended(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a run that the kernel says has ended."""
        status = header.get("status")
        if status == "error":
            error = {"name": _text(header, "name")[:200], "message": _text(header, "message")[:4000]}
            return {"status": "interrupted" if self.stopped else "error", "state": "kept", "error": error}
        if status == "killed":  # a program that the kernel ran, not the kernel itself
            return {"status": "killed", "state": "kept", "signal": _signal(header)}
        if status == "exited":
            code = header.get("exit_code")
            return {"status": "exited", "state": "kept", "exit_code": code & 0xFF if type(code) is int else 1}
        return {"status": "ok", "state": "kept", "exit_code": 0}

    def end_processes(self, processes: RunProcesses, kernel: int = 0) -> None:
        """End what it has left running, unless that was asked to stay; if it was stopped, also in its kernel."""
        if self.stopped:
            processes.end(below=kernel)
        elif self.keep_processes:
            processes.keep()
        elif ended := processes.end():
            self.feed("stderr", LEFT.format(ended, "" if self.kind == "invoke" else TO_KEEP).encode())
        processes.release()

    def never_began(self) -> dict[str, Any]:
        """Return the result of a run that was stopped while it waited for a kernel."""
        return self.ended({"status": "error", "name": "KeyboardInterrupt", "message": "stopped before it began"})

    def died(self, status: int) -> dict[str, Any]:
        """Return the result of a run whose process ended with a status of `waitpid`."""
        if self.over_memory:
            return {
                "status": "error",
                "state": "lost",
                "error": {"name": "MemoryLimitExceeded", "message": self.over_memory},
            }
        if not os.WIFSIGNALED(status):
            return {"status": "exited", "state": "lost", "exit_code": os.waitstatus_to_exitcode(status)}
        return {"status": "killed", "state": "lost", "signal": signal_name(os.WTERMSIG(status))}

    def command_ended(self, status: int) -> dict[str, Any]:
        """Return the result of a command whose shell ended with a status of `waitpid`."""
        result = {"status": "ok", "exit_code": 0} if status == 0 else self.died(status)
        if self.stopped and not self.over_memory:
            result["status"] = "interrupted"
        return {**result, "state": "lost" if self.kernel_lost else "kept"}

    def refuse(self, code: str, message: str) -> None:
        """Refuse a run whose code never ran."""
        self.close_stdin()
        self._send({"ok": False, "error": {"code": code, "message": message}}, b"")

    def finish(self, result: dict[str, Any], trace: bytes, changed: list[tuple[str, int]]) -> None:
        """Send the rest of the output, the artifacts and the result."""
        self.close_stdin()
        for capture in self._captures.values():
            capture.finish()
        out, err = self._captures.get("stdout"), self._captures.get("stderr")
        spills = [capture.spilled if capture else None for capture in (out, err)]
        for path, size in changed:
            if path not in spills:
                self._send({"event": "artifact", "path": path, "size": size}, b"")
        answer: dict[str, Any] = {
            "ok": True,
            **result,
            "output": {
                "stdout_bytes": out.total if out else 0,
                "stderr_bytes": err.total if err else 0,
                "stdout_spill": spills[0],
                "stderr_spill": spills[1],
                "spill_complete": all(capture.complete for capture in self._captures.values()),
                "displays_dropped": self._dropped,
            },
        }
        self._send(answer, trace[:MAX_BODY])


def _short_names(files: list[Any]) -> list[str]:
    return [name for name in files if type(name) is str and len(name) <= MAX_NAME]


def _whole(header: dict[str, Any], key: str, most: int) -> int:
    """Return a limit that the host asks for, as far as this agent grants it."""
    return max(0, min(int(header[key]), most))


def _signal(header: dict[str, Any]) -> str:
    """Return the name of a signal that a kernel reports; code can put anything there, and the host takes only names."""
    name = _text(header, "signal")
    is_name = name.startswith("SIG") and name.isalnum() and name.isascii() and name.isupper()
    return name if is_name and len("SIG") < len(name) <= MAX_SIGNAL else ""


def _text(header: dict[str, Any], key: str) -> str:
    """Return a field if it is a string. Code can put anything there, even what is nested too deeply to print."""
    value = header.get(key)
    return value if type(value) is str else ""
