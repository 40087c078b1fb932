"""Agents that break the rules of streams: the machine is dropped, and nobody else notices.

An honest neighbour has a stream open all the while, and it goes on carrying bytes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import RunCode
from guest.errors import ProtocolError
from guest.streams import CHUNK, GUEST_WINDOW, MAX_STREAMS, OPEN_BURST, WINDOW
from mcp_sandbox.app import Host
from mcp_sandbox.machines.provider import MachineRequest
from templates.build import BuiltTemplate
from tests.functional.machines import only
from tests.security.hostile_agents import (
    ATTACKER,
    DONE,
    NEIGHBOUR,
    InfiltratedProvider,
    growth_at_most,
    pack_hostile_agent,
)
from tests.waiting import HANG_S
from vmm.types import NetworkMode

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]  # what a virtual machine starts from has no archive

GROWTH_MB = 16  # promised in docs/specification.md
FRAMES = 1_000_000
STREAM = 'def stream(number, do, body=b"", **more): raw(encode({"stream": number, "do": do, **more}, body))\n'
OPEN = 'stream(1, "open")\n'
NUMBERS = {"zero": "0", "negative": "-1", "huge": "10**4000", "text": '"1"', "true": "True", "a fraction": "1.5"}
NUMBERS |= {"a list": "[1]", "nothing": "None", "not opened": "7"}
WINDOWS = {"zero": "0", "negative": "-1", "too large": str(GUEST_WINDOW + 1), "huge": "10**4000", "text": '"1"'}
WINDOWS |= {"true": "True", "a fraction": "1.5", "nothing": "None", "more than was used": "1"}

# What an agent sends, and why it loses its machine.
ATTACKS = {
    **{f"data on a stream, {what}": (f'stream({n}, "data", b"x")', "stream|header") for what, n in NUMBERS.items()},
    **{
        f"a stream with a number, {what}": (f'stream({n}, "open")', "stream|twice|header")
        for what, n in NUMBERS.items()
        if what != "not opened"
    },
    **{f"a window, {what}": (f'{OPEN}stream(1, "window", bytes={n})', "window|header") for what, n in WINDOWS.items()},
    "a window without a size": (f'{OPEN}stream(1, "window")', "window"),
    "a stream twice": (f"{OPEN}{OPEN}", "twice"),
    "a stream again after its end": (f'{OPEN}stream(1, "reset")\n{OPEN}', "twice"),
    "streams in falling order": ('stream(5, "open")\nstream(4, "open")', "twice"),
    "data after the end": (f'{OPEN}stream(1, "end")\nstream(1, "data", b"x")', "on a stream"),
    "two ends": (f'{OPEN}stream(1, "end")\nstream(1, "end")', "on a stream"),
    "no known word": (f'{OPEN}stream(1, "explode")', "on a stream"),
    "a list for a word": (f'{OPEN}stream(1, ["data"])', "on a stream"),
    "more than the window": (
        f'{OPEN}for _ in range({WINDOW // CHUNK + 1}): stream(1, "data", bytes({CHUNK}))',
        "more than a stream's window",
    ),
    "too many streams": (
        f'for number in range(1, {MAX_STREAMS + 2}): stream(number, "open")',
        f"more than {MAX_STREAMS} streams",
    ),
    "streams without end": (
        'number = 0\nwhile True:\n    number += 1\n    stream(number, "open"); stream(number, "reset")',
        "too often",
    ),
}
# What an honest host may have caused itself, however often it is sent: the machine is only slowed down.
FLOODS = {
    "data after the end": f'{OPEN}stream(1, "reset")\nframe = encode({{"stream": 1, "do": "data"}}, b"x")',
    "resets": f'{OPEN}frame = encode({{"stream": 1, "do": "reset"}})',
    "data without bytes": f'{OPEN}frame = encode({{"stream": 1, "do": "data"}})',
}


@dataclass
class Served:
    """Streams that were opened to the host, which never reads from those of the attacker."""

    opened: int = 0
    ended: int = 0

    async def ignore(self, stream: ByteStream) -> None:
        self.opened += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.ended += 1


async def echo(stream: ByteStream) -> None:
    async for data in stream:
        await stream.send(data)


@dataclass
class Neighbour:
    """An honest machine with a connection that stays open."""

    agent: AgentClient

    async def python(self, code: str) -> str:
        output = ""
        async with self.agent.run(RunCode(code)) as run:
            async for event in run:
                output += getattr(event, "text", "")
        return output.strip()

    async def answers(self, times: int) -> None:
        for number in range(times):
            code = f"peer.sendall(b'{number:09}'); print(peer.recv(9, socket.MSG_WAITALL).decode())"
            assert await self.python(code) == f"{number:09}"


@pytest.fixture(scope="module")
async def provider(
    host: Host, built: BuiltTemplate, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> InfiltratedProvider:
    archive = tmp_path_factory.mktemp("agent") / "hostile.tar"
    pack_hostile_agent(archive)
    return InfiltratedProvider(host, archive)


@pytest.fixture(scope="module")
async def neighbour(
    provider: InfiltratedProvider, built: BuiltTemplate, anyio_backend: str
) -> AsyncIterator[Neighbour]:
    request = MachineRequest(built.template.name, NEIGHBOUR, network=NetworkMode.PROXY, serve_stream=echo)
    async with provider.acquire(request) as lease:
        neighbour = Neighbour(lease.agent)
        await neighbour.python("import socket; peer = socket.create_connection(('127.0.0.1', 3128))")
        yield neighbour


@asynccontextmanager
async def attacker(provider: InfiltratedProvider, built: BuiltTemplate, served: Served) -> AsyncIterator[AgentClient]:
    request = MachineRequest(built.template.name, ATTACKER, network=NetworkMode.PROXY, serve_stream=served.ignore)
    with anyio.fail_after(HANG_S):
        async with provider.acquire(request) as lease:
            yield lease.agent


async def attack(agent: AgentClient, code: str) -> None:
    async with agent.run(RunCode(STREAM + code)) as run:
        await run.wait_finished()


async def test_an_attacker_may_open_streams(provider: InfiltratedProvider, built: BuiltTemplate):
    """The tests below do not pass because no stream of such a machine works."""
    served = Served()
    async with attacker(provider, built, served) as agent:
        await attack(agent, f'{OPEN}stream(1, "data", b"x")\nstream(2, "open")\nstream(2, "reset")\n{DONE}')
        await agent.ping()
    assert (served.opened, served.ended) == (2, 2)


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_agent_that_breaks_the_rules_loses_its_machine(
    provider: InfiltratedProvider, built: BuiltTemplate, neighbour: Neighbour, name: str
):
    code, reason = ATTACKS[name]
    served = Served()
    async with attacker(provider, built, served) as agent:
        with growth_at_most(GROWTH_MB), pytest.raises(ProtocolError, match=reason):
            await attack(agent, code)
        with pytest.raises(ProtocolError):
            await agent.ping()
    assert served.ended == served.opened <= OPEN_BURST * 4
    await neighbour.answers(1)


@pytest.mark.parametrize("name", FLOODS)
async def test_a_million_frames_cost_the_server_nothing_and_a_neighbour_is_answered(
    provider: InfiltratedProvider, built: BuiltTemplate, neighbour: Neighbour, name: str
):
    code = f"{FLOODS[name]} * 1000\nfor _ in range({FRAMES // 1000}): raw(frame)\n{DONE}"
    async with attacker(provider, built, Served()) as agent:
        with growth_at_most(GROWTH_MB):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attack, agent, code)
                await neighbour.answers(20)
        await agent.ping()


async def test_a_machine_without_a_network_opens_no_stream(
    provider: InfiltratedProvider, built: BuiltTemplate, neighbour: Neighbour
):
    with anyio.fail_after(HANG_S):
        async with provider.acquire(MachineRequest(built.template.name, ATTACKER)) as lease:
            with pytest.raises(ProtocolError, match="may not"):
                await attack(lease.agent, OPEN)
    await neighbour.answers(1)
