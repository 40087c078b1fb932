"""Moves bytes between a guest and a server, and counts them."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import anyio
import h11
from anyio.abc import ByteStream, TaskGroup

from guest.errors import first_error
from websearch.access import Access
from websearch.http_peer import HttpPeer, end_to_end

CLOSE = (b"connection", b"close")


async def relay(guest: ByteStream, server: ByteStream, access: Access) -> None:
    """Carry bytes both ways until both ends have finished, or one has failed."""

    async def pump(source: ByteStream, sink: ByteStream, count: Callable[[int], None]) -> None:
        try:
            with suppress(anyio.EndOfStream):
                while True:
                    data = await source.receive()
                    count(len(data))
                    await sink.send(data)
            await sink.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            tasks.cancel_scope.cancel()

    async with _task_group() as tasks:
        tasks.start_soon(pump, guest, server, access.count_sent)
        await pump(server, guest, access.count_received)


async def forward(guest: HttpPeer, server: HttpPeer, request: h11.Request, access: Access) -> None:
    """Send a request to a server and its answer to the guest. The server's connection serves one request."""
    outgoing = h11.Request(method=request.method, target=request.target, headers=[*request.headers, CLOSE])

    async def send_body() -> None:
        while not isinstance(event := await guest.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            access.count_sent(len(event.data))
            await server.send(event)
        await server.send(event)

    async with _task_group() as tasks:
        access.count_sent(len(request.target) + _size(request.headers))
        await server.send(outgoing)
        tasks.start_soon(send_body)
        await _return_response(guest, server, access)
        tasks.cancel_scope.cancel()  # a server may answer before it has read everything


async def _return_response(guest: HttpPeer, server: HttpPeer, access: Access) -> None:
    while True:
        event = await server.next_event()
        if isinstance(event, h11.Response | h11.InformationalResponse):
            access.count_received(_size(event.headers))
        if isinstance(event, h11.Response):
            headers = end_to_end(event.headers)
            event = h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)
        elif isinstance(event, h11.InformationalResponse):
            event = h11.InformationalResponse(status_code=event.status_code, headers=end_to_end(event.headers))
        elif isinstance(event, h11.Data):
            access.count_received(len(event.data))
        elif not isinstance(event, h11.EndOfMessage):
            raise anyio.BrokenResourceError  # the server closed the connection too early
        await guest.send(event)
        if isinstance(event, h11.EndOfMessage):
            return


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the bytes of headers: they carry data as well as a body does."""
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


@asynccontextmanager
async def _task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group that raises the first error of its tasks as it is."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from None
