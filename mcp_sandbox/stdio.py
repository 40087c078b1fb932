"""The process's stdin and stdout as MCP streams that can be cancelled.

The SDK reads stdin in a worker thread; nothing can take a thread out of a blocking read, so a server told to
stop would wait for its client. Here the event loop waits instead, and reads and writes only what does not block.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio

READ_BYTES = 1 << 16
PIPE_WRITE_BYTES = 4096  # PIPE_BUF: what a pipe that polls as writable takes without blocking


class LineReader:
    """Lines of text from a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.ended = anyio.Event()

    async def __aiter__(self) -> AsyncIterator[str]:
        pending = bytearray()
        while True:
            searched = len(pending)
            await _ready(anyio.wait_readable, self._fd)
            chunk = os.read(self._fd, READ_BYTES)
            pending += chunk
            while (end := pending.find(b"\n", searched)) >= 0:
                yield pending[: end + 1].decode(errors="replace")
                del pending[: end + 1]
                searched = 0
            if not chunk:
                break
        if pending.strip():
            yield pending.decode(errors="replace")
        self.ended.set()


class TextWriter:
    """Text to a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def write(self, text: str) -> None:
        """Write all of `text`.

        Raises:
            anyio.ClosedResourceError: nobody reads any more; to the SDK that is the end of the connection.
        """
        rest = memoryview(text.encode())
        try:
            while rest:
                await _ready(anyio.wait_writable, self._fd)
                rest = rest[os.write(self._fd, rest[:PIPE_WRITE_BYTES]) :]
        except BrokenPipeError:
            raise anyio.ClosedResourceError from None

    async def flush(self) -> None:
        """Nothing is buffered."""


async def _ready(wait: Callable[[int], Awaitable[None]], fd: int) -> None:
    # A regular file cannot be polled and never blocks.
    with suppress(PermissionError):
        await wait(fd)


@contextmanager
def claimed_stdio() -> Iterator[tuple[int, int]]:
    """The descriptors of the wire; while they are out, fd 0 is empty and fd 1 is stderr.

    So nothing that prints by accident, in this process or a child, can damage the protocol.
    """
    wire_in, wire_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(null, 0)
        os.dup2(2, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)
