"""Looking names up and connecting, without a bridge."""

import socket
import threading
from ipaddress import ip_address

import anyio
import pytest
from anyio.abc import SocketStream

from tests.waiting import HANG_S
from tests.web.sites import pages, serving
from websearch import dial

pytestmark = pytest.mark.anyio

SLOW = 40  # lookups: more than the event loop's own threads


async def test_a_connection_that_comes_as_its_caller_gives_up_is_closed(monkeypatch):
    connect_tcp, connected = anyio.connect_tcp, []

    async def connect_and_give_up(host: str, port: int) -> SocketStream:
        connected.append(await connect_tcp(host, port))
        caller.cancel()
        return connected[0]

    monkeypatch.setattr(anyio, "connect_tcp", connect_and_give_up)
    async with serving(pages({})) as port:
        with anyio.CancelScope() as caller:
            await dial.connect([ip_address("127.0.0.1")], port)
        assert caller.cancelled_caught
        with pytest.raises(anyio.ClosedResourceError):
            await connected[0].send(b"x")


async def test_lookups_that_were_given_up_hold_up_no_other(monkeypatch):
    answer, begun = threading.Event(), threading.Semaphore(0)

    def getaddrinfo(host: bytes, *_args: object, **_options: object) -> list[tuple[object, ...]]:
        if host == b"slow.test":
            begun.release()
            answer.wait(HANG_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(SLOW):
                tasks.start_soon(dial.resolve, "slow.test")
            while not begun.acquire(blocking=False):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert [str(address) for address in await dial.resolve("fast.test")] == ["192.0.2.1"]
    finally:
        answer.set()
