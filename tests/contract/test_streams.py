"""A machine whose lease allows it opens streams to its host, with no network device, on every driver."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client.streams import ServeStream
from mcp_sandbox.machines.unique import go_online, new_identity
from tests.functional.machines import Clone, Machines
from vmm.types import NetworkMode

if TYPE_CHECKING:
    from vmm.driver import Machine

pytestmark = pytest.mark.vm

ASK = """python3 -c '
import socket
for family, address in (socket.AF_INET, ("127.0.0.1", 3128)), (socket.AF_UNIX, "/run/mcp-sandbox/proxy.sock"):
    with socket.socket(family) as peer:
        peer.connect(address)
        peer.sendall(b"x" * 300_000)
        peer.shutdown(socket.SHUT_WR)
        print(sum(len(data) for data in iter(lambda: peer.recv(65536), b"")))
'"""


async def echo(stream: ByteStream) -> None:
    async for data in stream:
        await stream.send(data)
    await stream.send_eof()


@asynccontextmanager
async def online(machines: Machines, serve: ServeStream) -> AsyncIterator[Clone]:
    """A machine whose lease has the network mode `proxy`."""
    async with machines.leased(NetworkMode.PROXY, serve) as lease:
        yield Clone(cast("Machine", lease.machine), lease.agent)


async def test_a_connection_to_loopback_reaches_the_host_as_a_stream(machines: Machines):
    async with online(machines, echo) as clone:
        assert (await clone.command(ASK)).out.split() == ["300000", "300000"]


async def test_a_machine_without_a_network_has_nothing_to_connect_to(machines: Machines):
    async with machines.clone() as clone:
        assert "ConnectionRefused" in (await clone.command(ASK)).stderr.head


async def test_a_machine_leased_without_a_network_again_loses_its_streams(machines: Machines):
    opened = anyio.Event()

    async def wait(stream: ByteStream) -> None:
        opened.set()
        await stream.receive()

    async with online(machines, wait) as clone:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clone.command, ASK)
            await opened.wait()
            await clone.agent.refresh(new_identity())
        assert "ConnectionRefused" in (await clone.command(ASK)).stderr.head


async def test_a_machine_that_waited_without_a_network_gets_streams_with_its_lease(machines: Machines):
    async with machines.leased() as offline:
        lease = await go_online(offline, echo)
        clone = Clone(cast("Machine", lease.machine), lease.agent)
        assert (await clone.command(ASK)).out.split() == ["300000", "300000"]


async def test_closed_streams_stay_closed_until_the_next_refresh(machines: Machines):
    opened = anyio.Event()

    async def wait(stream: ByteStream) -> None:
        opened.set()
        await stream.receive()

    async with online(machines, wait) as clone:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clone.command, ASK)
            await opened.wait()
            assert await clone.agent.close_streams() == 1
        assert "ConnectionRefused" in (await clone.command(ASK)).stderr.head
        clone.agent.allow_streams(echo)
        await clone.agent.refresh(new_identity(network=NetworkMode.PROXY))
        assert (await clone.command(ASK)).out.split() == ["300000", "300000"]
