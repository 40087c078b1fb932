"""The process's stdin and stdout as lines and text, read and written without blocking.

The SDK reads stdin in a worker thread. Nothing can interrupt a blocking read in a thread, so a server that has to
stop would wait for its client. Here the event loop waits instead, and only reads and writes what does not block.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio

READ_BYTES = 1 << 16
PIPE_WRITE_BYTES = 4096  # PIPE_BUF: what a pipe that polls as writable takes without blocking
END_BYTES = 256  # of each end of a line that is refused, where its id is looked for


class LineReader:
    """Lines from a file descriptor. A line that is too long is refused; only its ends are kept."""

    def __init__(
        self, fd: int, max_bytes: int, refuse: Callable[[bytes, bytes], Awaitable[None]], received: bytes = b""
    ) -> None:
        self._fd = fd
        self._received = received  # what was read before
        self._max_bytes = max_bytes
        self._refuse = refuse

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pending = bytearray()
        start = b""  # of a line that is too long already
        while True:
            searched = len(pending)
            chunk = await self._read()
            pending += chunk
            while (end := pending.find(b"\n", searched)) >= 0:
                line = pending[: end + 1]
                del pending[: end + 1]
                searched = 0
                if start or len(line) > self._max_bytes:
                    await self._refuse(start or bytes(line[:END_BYTES]), bytes(line[-END_BYTES:]))
                    start = b""
                else:
                    yield bytes(line)
            if len(pending) > self._max_bytes:
                start = start or bytes(pending[:END_BYTES])
                del pending[:-END_BYTES]
            if not chunk:
                break
        if pending.strip() and not start:
            yield bytes(pending)

    async def _read(self) -> bytes:
        if self._received:
            chunk, self._received = self._received, b""
            return chunk
        await _ready(anyio.wait_readable, self._fd)
        return os.read(self._fd, READ_BYTES)


class TextWriter:
    """Text to a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = anyio.Lock()

    async def write(self, text: str) -> None:
        """Write all of `text`.

        Raises:
            anyio.ClosedResourceError: the reader is gone.
        """
        rest = memoryview(text.encode())
        try:
            async with self._turn:
                while rest:
                    await _ready(anyio.wait_writable, self._fd)
                    rest = rest[os.write(self._fd, rest[:PIPE_WRITE_BYTES]) :]
        except BrokenPipeError:
            raise anyio.ClosedResourceError from None


async def _ready(wait: Callable[[int], Awaitable[None]], fd: int) -> None:
    # A regular file cannot be polled and never blocks.
    with suppress(PermissionError):
        await wait(fd)


@contextmanager
def claimed_stdio() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of the wire. Meanwhile fd 0 is empty and fd 1 is stderr.

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
