"""Reads untrusted bytes in a process of its own, which has no network, no other process and no files to write.

The process is a fork that waits, so it has all libraries already. It reads one download, answers, and ends.
"""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from guest.jobs import ANSWER, MAX_BODY, MAX_HEADER
from guest.prctl import die_with_parent, set_dumpable
from guest.seccomp import isolate
from guest.web.errors import WebError

MEMORY = 256 * 1024 * 1024  # bytes that the work may take on top of what the process has
PIECE = 1024 * 1024
FIRST_FD = 3
READY = b"r"
GRACE_S = 1.0  # for the process to be ended from outside, before it ends itself

Result = tuple[dict[str, Any], bytes]
Work = Callable[[dict[str, Any], bytes], Result]  # reads a download; its fields say what to do with it


class Reading(Protocol):
    """What reads a download for a job."""

    def read(self, fields: dict[str, Any], data: bytes, *, timeout_s: float) -> Result:
        """Return what is in `data`. Raises WebError."""
        ...


class Reader:
    """A process without a network that waits for one download. It ends with the context."""

    def __init__(self, work: Work, rehearse: Callable[[], None] = lambda: None) -> None:
        """Start the process, which calls `rehearse` before it is ready for a download."""
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._waited = False
        self._pid = os.fork()
        if self._pid == 0:
            _serve(work, rehearse, orders, answers)
        os.close(orders)
        os.close(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._orders)
        os.close(self._answers)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def wait(self) -> None:
        """Return when the process is ready, or dead."""
        if not self._waited:
            os.read(self._answers, len(READY))
        self._waited = True

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process, which was ready, dies."""
        return self._answers

    def read(self, fields: dict[str, Any], data: bytes, *, timeout_s: float) -> Result:
        """Return what the process finds in `data`. Raises WebError if the work raises it, or fails."""
        self.wait()
        try:
            _write(self._orders, {"timeout_s": timeout_s, **fields}, data)
        except BrokenPipeError as error:
            raise WebError("unreadable", "the process that reads pages died") from error
        header, body = _receive(self._answers, time.monotonic() + timeout_s)
        if "error" in header:
            raise WebError(**header["error"])
        return header, body


def pack(header: dict[str, Any], body: bytes) -> bytes:
    """Return an answer as it is sent, without its body."""
    packed = json.dumps(header).encode()
    if len(packed) > MAX_HEADER or len(body) > MAX_BODY:
        return pack(WebError("too_large", "what was found is too large").as_header(), b"")
    return ANSWER.pack(len(packed), len(body)) + packed


def _serve(work: Work, rehearse: Callable[[], None], orders: int, answers: int) -> NoReturn:
    """Be the process that works: it ends here."""
    try:
        die_with_parent()
        _keep_only(orders, answers)
        set_dumpable(dumpable=False)
        isolate()
        rehearse()
        _limit()
        os.write(answers, READY)
        _write(answers, *_result(work, orders))
    finally:
        os._exit(0)


def _keep_only(*kept: int) -> None:
    """Close all descriptors but these and the first three."""
    following = FIRST_FD
    for number in sorted(kept):
        os.closerange(following, number)
        following = number + 1
    os.closerange(following, os.sysconf("SC_OPEN_MAX"))


def _result(work: Work, orders: int) -> Result:
    try:
        fields, data = _receive(orders)
        signal.setitimer(signal.ITIMER_REAL, fields["timeout_s"] + GRACE_S)  # whoever waits for it may be dead
        return work(fields, data)
    except WebError as error:
        return error.as_header(), b""
    except MemoryError:
        return WebError("too_large", "reading it takes more memory than is allowed").as_header(), b""
    except Exception as error:  # parsers fail in countless ways on what servers send
        return WebError("unreadable", f"it cannot be read: {type(error).__name__}: {error}").as_header(), b""


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write(pipe: int, header: dict[str, Any], body: bytes) -> None:
    with os.fdopen(pipe, "wb", closefd=False) as file:
        file.write(pack(header, body))
        file.write(body)


def _receive(pipe: int, deadline: float | None = None) -> Result:
    header_size, body_size = ANSWER.unpack(_take(pipe, ANSWER.size, deadline))
    if header_size > MAX_HEADER or body_size > MAX_BODY:
        raise WebError("worker", "the process that reads pages broke the protocol")
    header = json.loads(_take(pipe, header_size, deadline))
    return header, _take(pipe, body_size, deadline)


def _take(pipe: int, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = None if deadline is None else max(0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise WebError("timeout", "reading the page took too long")
        piece = os.read(pipe, min(PIECE, size - len(data)))
        if not piece:
            raise WebError("unreadable", "the process that reads pages died on it")
        data += piece
    return bytes(data)
