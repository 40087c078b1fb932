"""Hostile code in a machine asks the bridge for what it may not have: every case, through the tunnel of its machine."""

import base64
import json
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute

from guest.client.messages import RunCode
from tests.functional.machines import Machines, only
from tests.waiting import HANG_S
from tests.web.refusals import CASES, CLOSED, NAMES
from tests.web.world import World, forget_proxies
from vmm.types import NetworkMode
from websearch.access import Caller

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]

# The one site is at an address of loopback that the operator allows. All others are refused.
SITE_ADDRESS = "127.0.0.9"
OUTCOMES = "/workspace/outcomes.json"
# Makes each attempt with sockets of its own and writes what came back.
ATTEMPTS = f"""
import base64, json, socket
def ask(request, then):
    with socket.create_connection(("127.0.0.1", 3128)) as peer:
        answer = b""
        try:
            peer.sendall(request)
            while then and b"\\r\\n\\r\\n" not in answer and (data := peer.recv(65536)): answer += data
            if then: peer.sendall(then)
            while data := peer.recv(65536): answer += data
        except ConnectionError: pass
        return answer
with open("/workspace/attempts.json") as file:
    attempts = [[base64.b64decode(part) for part in attempt] for attempt in json.load(file)]
answers = [ask(*attempt)[:1000].decode("latin-1") for attempt in attempts]
with open({OUTCOMES!r}, "w") as file: json.dump(answers, file)
"""


@dataclass(frozen=True)
class Outcome:
    """What the guest got, and what the bridge recorded."""

    answer: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Attempted:
    """The outcome of each case, and what became of the world outside."""

    outcomes: dict[str, Outcome]
    world: World
    arrived: bytes  # at the site


@pytest.fixture(scope="module")
async def attempted(loaded: Machines, anyio_backend: str) -> Attempted:
    """One machine whose code has tried everything."""
    world = World(
        names={name: [address] for address, name in NAMES.items()}
        | {"site.test": [SITE_ADDRESS], "mixed.test": ["93.184.216.34", "10.0.0.1"]},
        policy={"networks": {"tests": f"{SITE_ADDRESS}/32"}, "deny": ["denied.test", "*.tracker.test"]},
    )
    arrived = bytearray()

    async def site(stream: ByteStream) -> None:
        async with stream:
            async for data in stream:
                arrived.extend(data)

    listener = await anyio.create_tcp_listener(local_host=SITE_ADDRESS)
    port = listener.extra(SocketAttribute.local_port)
    world.ports.add(port)
    attempts = [(case.request.replace(b"{port}", b"%d" % port), case.then) for case in CASES.values()]
    machines = Machines(loaded.host, loaded.built)
    with pytest.MonkeyPatch.context() as patch, anyio.fail_after(HANG_S):
        forget_proxies(patch)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, site)
            outcomes = await _try(machines, world, attempts)
            tasks.cancel_scope.cancel()
    await machines.assert_none_left()
    return Attempted(dict(zip(CASES, outcomes, strict=True)), world, bytes(arrived))


async def _try(machines: Machines, world: World, attempts: list[tuple[bytes, bytes]]) -> list[Outcome]:
    bridge = world.bridge()
    starts: list[int] = []  # for each connection in turn, how many requests were recorded before it

    async def serve(stream: ByteStream) -> None:
        starts.append(len(world.accesses))
        await bridge.serve(stream, Caller("ada", "sb-1"))

    async with machines.leased(NetworkMode.PROXY, serve) as lease:
        written = [[base64.b64encode(part).decode() for part in attempt] for attempt in attempts]
        await lease.agent.write("/workspace/attempts.json", json.dumps(written).encode())
        async with lease.agent.run(RunCode(ATTEMPTS)) as run:
            ended = await run.wait_finished()
        assert ended.status == "ok", ended.error
        answers = json.loads((await lease.agent.read(OUTCOMES, limit=2**20)).data)
    assert len(starts) == len(attempts)
    ends = [*starts[1:], len(world.accesses)]
    rules = [tuple(world.rules[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [Outcome(*pair) for pair in zip(answers, rules, strict=True)]


def test_all_of_many_cases_were_tried(attempted: Attempted):
    assert len(attempted.outcomes) == len(CASES) >= 120


@pytest.mark.parametrize("name", CASES)
def test_hostile_code_is_refused(attempted: Attempted, name: str):
    case, outcome = CASES[name], attempted.outcomes[name]
    if case.rule == CLOSED:
        assert outcome.rules == ()
        assert " 200 " not in outcome.answer.partition("\r\n")[0]
    elif case.then:  # the tunnel stood; what was said in it does not fit
        assert outcome.rules == (case.rule,)
        assert outcome.answer.endswith("\r\n\r\n"), "the bridge said nothing else"
    else:
        assert outcome.rules == (case.rule,)
        assert f" refused by mcp-sandbox: {case.rule}\r\n" in outcome.answer


def test_nothing_that_was_refused_left_the_host(attempted: Attempted):
    assert attempted.arrived == b""
    assert not any("evil.net" in name for name in attempted.world.lookups)
    assert not any(access.verdict.allowed for access in attempted.world.accesses)
