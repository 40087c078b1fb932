"""Runs work on untrusted bytes in a process of its own, which has no network, no other process and no files to write.

The process is a fork, so it has the bytes and all libraries already.
"""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from guest.jobs import ANSWER, MAX_BODY, MAX_HEADER
from guest.prctl import set_dumpable
from guest.seccomp import isolate
from guest.web.errors import WebError

MEMORY = 256 * 1024 * 1024  # bytes that the work may take on top of what the process has
PIECE = 1024 * 1024
FIRST_FD = 3

Result = tuple[dict[str, Any], bytes]


def run_offline(work: Callable[[], Result], *, timeout_s: float) -> Result:
    """Return what `work` returns in a process without a network. Raises WebError if it raises it, or fails."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work(work, writer)
    os.close(writer)
    try:
        header, body = _receive(reader, time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if "error" in header:
        raise WebError(**header["error"])
    return header, body


def pack(header: dict[str, Any], body: bytes) -> bytes:
    """Return an answer as it is sent, without its body."""
    packed = json.dumps(header).encode()
    if len(packed) > MAX_HEADER or len(body) > MAX_BODY:
        return pack(WebError("too_large", "what was found is too large").as_header(), b"")
    return ANSWER.pack(len(packed), len(body)) + packed


def _work(work: Callable[[], Result], writer: int) -> NoReturn:
    """Be the process that works: it ends here."""
    try:
        os.closerange(FIRST_FD, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        set_dumpable(dumpable=False)
        _limit()
        isolate()
        header, body = _result(work)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pack(header, body))
            pipe.write(body)
    finally:
        os._exit(0)


def _result(work: Callable[[], Result]) -> Result:
    try:
        return work()
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


def _receive(reader: int, deadline: float) -> Result:
    header_size, body_size = ANSWER.unpack(_take(reader, ANSWER.size, deadline))
    if header_size > MAX_HEADER or body_size > MAX_BODY:
        raise WebError("worker", "the process that reads pages broke the protocol")
    header = json.loads(_take(reader, header_size, deadline))
    return header, _take(reader, body_size, deadline)


def _take(reader: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not select.select([reader], [], [], max(0, deadline - time.monotonic()))[0]:
            raise WebError("timeout", "reading the page took too long")
        piece = os.read(reader, min(PIECE, size - len(data)))
        if not piece:
            raise WebError("unreadable", "the process that reads pages died on it")
        data += piece
    return bytes(data)
