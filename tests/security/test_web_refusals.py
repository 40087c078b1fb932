"""Hostile code in a machine asks the bridge for what it may not have: every case, through the tunnel of its machine."""

import base64
import json
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client.messages import RunCode
from tests.functional.machines import Machines, only
from tests.waiting import HANG_S
from tests.web.refusals import CASES, Target, serving_target
from tests.web.world import World, forget_proxies
from vmm.types import NetworkMode
from websearch.access import Caller

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]

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
    target: Target


@pytest.fixture(scope="module")
async def attempted(loaded: Machines, anyio_backend: str) -> Attempted:
    """One machine whose code has tried everything."""
    machines = Machines(loaded.host, loaded.built)
    with pytest.MonkeyPatch.context() as patch, anyio.fail_after(HANG_S):
        forget_proxies(patch)
        async with serving_target() as target:
            attempts = [(target.request(case), case.then) for case in CASES.values()]
            outcomes = await _try(machines, target.world, attempts)
    await machines.assert_none_left()
    return Attempted(dict(zip(CASES, outcomes, strict=True)), target)


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
    outcome = attempted.outcomes[name]
    CASES[name].check(outcome.answer.encode("latin-1"), outcome.rules)


def test_nothing_that_was_refused_left_the_host(attempted: Attempted):
    attempted.target.check_nothing_left()
