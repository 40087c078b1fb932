"""Machines that send without end: memory stays bounded, and neighbours on the same event loop keep their turns."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, RunCode
from guest.client.pacing import BURST_S, ROUNDS_BETWEEN, SHARE, TURN_S, Pace
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import MAGIC, MAX_ARTIFACTS, MAX_FALSE_STARTS, PREFIX, Decoder, encode
from tests.unit.scripted_agent import DONE, FakeAgent, collect, connected, forever

FRAMES = 3000
TICKS_PER_TURN = 5
BURST = TICKS_PER_TURN * BURST_S / TURN_S  # frames


class Ticking:
    """A clock on which every look costs a fifth of a turn."""

    now = 0.0

    def __call__(self) -> float:
        self.now += TURN_S / TICKS_PER_TURN
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guest.client.channel.Pace", partial(Pace, Ticking()))


async def answers(agent: FakeAgent) -> None:
    while True:
        await agent.reply(await agent.expect("ping"), {"ok": True})


async def floods(agent: FakeAgent) -> None:
    """Send a burst of output in one piece, then end the run."""
    run = await agent.expect("run")
    await agent.pipe.send(encode({"id": run, "event": "output", "stream": "stdout"}, b"x") * FRAMES)
    await agent.reply(run, DONE)
    await anyio.sleep_forever()


@pytest.mark.parametrize("flooding", [1, 6])
async def test_floods_and_a_neighbour_take_turns(ticking, flooding):
    """Counted in frames handled between two answers to the neighbour, not in time."""
    handled = 0
    done = 0

    async def follow(client: AgentClient) -> None:
        nonlocal handled, done
        async with client.run(RunCode("1")) as run:
            taken = run.take

            def counted(frame):
                nonlocal handled
                handled += 1
                return taken(frame)

            run.take = counted  # type: ignore[method-assign]
            await run.wait_finished()
        done += 1

    async def flood() -> None:
        async with connected(floods) as client:
            await follow(client)

    between: list[int] = []
    async with connected(answers) as neighbour, anyio.create_task_group() as tasks:
        for _ in range(flooding):
            tasks.start_soon(flood)
        while done < flooding:
            before = handled
            await neighbour.ping()
            between.append(handled - before)
    assert handled == flooding * (FRAMES + 1)  # slowed, not cut
    # A ping takes some ten rounds of the loop. However many channels flood, one of them gets a turn every few rounds.
    fair = 30 * TICKS_PER_TURN / ROUNDS_BETWEEN
    assert max(between) <= flooding * BURST + fair
    assert max(between[len(between) // 2 :]) <= fair  # the bursts are used up by then
    assert len(between) >= handled / fair


async def test_the_turns_of_all_busy_channels_are_rounds_apart():
    turns: list[int] = []
    rounds = 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await anyio.lowlevel.checkpoint()

    async def channel() -> None:
        pace = Pace(Ticking())
        pace._used_s = 2 * BURST_S
        for _ in range(10):
            pace.begin_turn()
            turns.append(rounds)
            while not pace.turn_is_over():
                pass
            await pace.end_turn()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_rounds)
        async with anyio.create_task_group() as channels:
            for _ in range(3):
                channels.start_soon(channel)
        tasks.cancel_scope.cancel()
    later = turns[3:]  # the first turn of each is free
    assert all(after - before >= ROUNDS_BETWEEN for before, after in pairwise(later))


async def test_a_channel_that_rests_gets_its_burst_back():
    clock = Ticking()
    pace = Pace(clock)
    pace._used_s = 2 * BURST_S
    clock.now += 2 * BURST_S / SHARE
    pace.begin_turn()
    assert pace._used_s == 0


async def test_a_flood_of_artifacts_ends_the_run_and_says_why():
    sent = 0

    async def script(agent: FakeAgent) -> None:
        nonlocal sent
        run = await agent.expect("run")
        while True:
            await agent.reply(run, {"event": "artifact", "path": "/tmp/outputs/a", "size": 1})
            sent += 1

    async with connected(script) as client:
        with pytest.raises(ProtocolError, match="more artifacts than the run allows"):
            await collect(client, RunCode("1"))
    assert sent < MAX_ARTIFACTS + 200  # what is on its way when the client stops reading


async def test_as_many_artifacts_as_a_run_may_have_are_no_flood():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        for number in range(MAX_ARTIFACTS):
            await agent.reply(run, {"event": "artifact", "path": f"/tmp/outputs/{number}", "size": 1})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        events = await collect(client, RunCode("1"))
    assert sum(isinstance(event, Artifact) for event in events) == MAX_ARTIFACTS


async def test_a_path_longer_than_linux_has_is_an_attack():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "artifact", "path": "/" + "x" * 4096, "size": 1})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError, match="path"):
            await collect(client, RunCode("1"))


GARBAGE: dict[str, Callable[[], bytes]] = {
    "false starts": lambda: MAGIC * 1000,
    "overlapping frames": lambda: PREFIX.pack(MAGIC, 60, 0) * 1000,
    "frames of other conversations": lambda: encode({"id": 1, "ok": True}) * 1000,
}


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_before_the_greeting_is_bounded(garbage):
    async def script(agent: FakeAgent) -> None:
        await agent.pipe.send(GARBAGE[garbage]())
        await agent.greet()
        await anyio.sleep_forever()

    with pytest.raises(ProtocolError):
        async with connected(script, greet=False, seeking=True):
            pass


def test_few_false_starts_are_skipped():
    data = MAGIC * MAX_FALSE_STARTS + encode({"id": 1})
    assert [frame.header for frame in Decoder(seeking=True).feed(data)] == [{"id": 1}]


async def test_requests_that_were_given_up_count_until_they_are_answered():
    async with connected(forever) as client:
        for _ in range(64):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client.ping)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
        with pytest.raises(RequestRefused, match="64 requests are open"):
            await client.ping()
