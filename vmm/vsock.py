"""The host's end of a machine's vsock: a Unix socket that the monitor listens on, in the machine's root directory.

A connection names the guest's port in its first line, and the monitor answers with one, too. Firecracker and Cloud
Hypervisor speak the same two lines.
"""

import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteStream, SocketStream

from vmm.errors import MachineLost

PORT = 1024  # that the agent listens on
CID = 3  # of every machine: each is alone with its host
MAX_RESETS = 3  # of connections that nothing came from
MAX_UNANSWERED = 4 * 1024 * 1024  # bytes that are kept for another connection: a few of the largest requests
MAX_ANSWER = 64  # bytes; honest answers are "OK 1073741824\n"


def find_socket(directory: int, name: str) -> int:
    """Return a descriptor of a Unix socket to connect to. The monitor owns the directory, so no link is followed.

    Raises:
        OSError: there is none.
        MachineLost: something else has its name.
    """
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    if not stat.S_ISSOCK(os.fstat(place).st_mode):
        os.close(place)
        raise MachineLost(f"{name} of the machine is no socket")
    return place


def open_socket(directory: int, name: str) -> socket.socket:
    """Connect to a Unix socket, see `find_socket`."""
    place = find_socket(directory, name)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(f"/proc/self/fd/{place}")
        except BaseException:
            connection.close()
            raise
    finally:
        os.close(place)
    return connection


async def connect(directory: int, name: str, port: int = PORT) -> ByteStream:
    """Return a stream to a port of the guest; raise MachineLost, or ConnectionRefusedError if it does not listen."""
    try:
        stream = await SocketStream.from_socket(open_socket(directory, name))
    except (FileNotFoundError, ConnectionRefusedError) as error:  # a monitor that ends may leave it or remove it
        raise ConnectionRefusedError("the monitor does not listen on the machine's vsock") from error
    except OSError as error:
        raise MachineLost(f"the machine's vsock cannot be reached: {error}") from error
    try:
        await stream.send(f"CONNECT {port}\n".encode())
        await _accepted(stream)
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    return stream


async def _accepted(stream: ByteStream) -> None:
    """Read the monitor's line, byte by byte: what follows is the agent's."""
    answer = b""
    try:
        while not answer.endswith(b"\n") and len(answer) < MAX_ANSWER:
            answer += await stream.receive(1)
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise ConnectionRefusedError("no agent listens in the machine") from error
    if not answer.startswith(b"OK "):
        raise MachineLost(f"the monitor answers {answer!r} on the machine's vsock")


class Reconnecting(ByteStream):
    """A stream to the agent that can be connected anew: a snapshot closes all connections of a machine.

    Its user does not notice, as long as no bytes are in flight then.

    A machine that continues after a snapshot may first accept a connection, and then close it with the old ones
    (Firecracker before 1.16). So a connection that ends before anything came from it is made again, and what was sent
    is sent again.
    """

    def __init__(self, stream: ByteStream, reconnect: Callable[[], Awaitable[ByteStream]]) -> None:
        self._stream = stream
        self._reconnect = reconnect
        self._replaced: anyio.Event | None = None  # while another connection is expected
        self._sending = anyio.Lock()
        self._expect_reset()

    def _expect_reset(self) -> None:
        self._unanswered: bytes | None = b""  # what was sent until the first answer
        self._resets_left = MAX_RESETS

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            stream, replaced = self._stream, self._replaced
            try:
                data = await stream.receive(max_bytes)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                if replaced is not None or self._replaced is not None:
                    await (replaced or self._replaced or anyio.Event()).wait()
                elif stream is self._stream and not await self._sent_again():
                    raise
            else:
                self._unanswered = None
                return data

    async def _sent_again(self) -> bool:
        """Continue on another connection, if nothing came from this one and the machine runs."""
        async with self._sending:
            if self._unanswered is None or not self._resets_left:
                return False
            self._resets_left -= 1
            try:
                stream = await self._reconnect()
            except MachineLost:
                return False
            old, self._stream = self._stream, stream
            await anyio.aclose_forcefully(old)
            with suppress(anyio.BrokenResourceError):  # `receive` notices
                await stream.send(self._unanswered)
            return True

    async def send(self, item: bytes) -> None:
        async with self._sending:
            if self._unanswered is None or len(self._unanswered) + len(item) > MAX_UNANSWERED:
                self._unanswered = None  # a guest that takes that much has no reset pending, or never answers
                await self._stream.send(item)
                return
            self._unanswered += item
            with suppress(anyio.BrokenResourceError):  # `receive` notices
                await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._unanswered = None
        await self._stream.aclose()

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """Expect the connection to end in the block, and continue on another one after it, even if the block fails."""
        self._replaced = replaced = anyio.Event()
        try:
            yield
        finally:
            try:
                with anyio.CancelScope(shield=True), suppress(MachineLost):  # its user notices when it sends
                    old, self._stream = self._stream, await self._reconnect()
                    self._expect_reset()
                    await anyio.aclose_forcefully(old)
            finally:
                self._replaced = None
                replaced.set()
