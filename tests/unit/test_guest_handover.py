"""Handing over a greeted agent from one client to another."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream

from guest.client import AgentClient
from guest.client.client import Detached
from guest.client.messages import AgentState, Identity, Output, RunCode
from guest.errors import AgentGone, GuestError, ProtocolError, RequestRefused
from guest.protocol import Frame, encode
from tests.unit.fake_guest import FakeGuest

TIMEOUT_S = 20.0
IDENTITY = Identity("host", "0" * 32, bytes(32))


class Guest(FakeGuest):
    """Counts greetings and delays the answers to `list`."""

    def __init__(self) -> None:
        super().__init__({})
        self.greetings = 0
        self.held: list[Frame] = []

    async def _hello(self, frame: Frame) -> None:
        self.greetings += 1
        await super()._hello(frame)

    async def _list(self, frame: Frame) -> None:
        self.held.append(frame)

    async def answer_held(self) -> None:
        await self._ok(self.held.pop(), b"[]", truncated=False)


@asynccontextmanager
async def started() -> AsyncIterator[tuple[Guest, ByteStream]]:
    """A guest, and the stream to it."""
    ends = [await SocketStream.from_socket(end) for end in socket.socketpair()]
    guest = Guest()
    with anyio.fail_after(TIMEOUT_S):
        async with ends[0], ends[1], anyio.create_task_group() as tasks:
            tasks.start_soon(guest.serve, ends[1])
            yield guest, ends[0]
            tasks.cancel_scope.cancel()


async def detached(stream: ByteStream) -> Detached:
    async with AgentClient.open(stream, timeout_s=TIMEOUT_S, identity=IDENTITY) as client:
        await counted(client)
        return await client.detach()


async def counted(client: AgentClient) -> str:
    async with client.run(RunCode("count")) as run:
        return "".join([event.text async for event in run if isinstance(event, Output)])


def copied(state: AgentState) -> AgentState:
    """Return the state as another process would receive it."""
    return AgentState.model_validate_json(state.model_dump_json())


async def test_another_client_goes_on_without_a_greeting():
    async with started() as (guest, stream):
        _, state = await detached(stream)
        async with AgentClient.adopt(stream, copied(state), timeout_s=TIMEOUT_S) as client:
            assert await counted(client) == "2\n"
            assert client.hello.language == "python"
            assert client.refreshed is not None
    assert guest.greetings == 1


async def test_an_agent_can_be_handed_over_many_times_and_at_once():
    async with started() as (guest, stream):
        _, state = await detached(stream)
        for _ in range(3):
            async with AgentClient.adopt(stream, state, timeout_s=TIMEOUT_S) as client:
                _, state = await client.detach()
        async with AgentClient.adopt(stream, state, timeout_s=TIMEOUT_S) as client:
            assert await counted(client) == "2\n"
    assert guest.greetings == 1


async def test_every_request_of_a_detached_client_fails():
    async with started() as (_, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        await client.detach()
        await client.wait_failed()
        for request in (client.ping, client.detach):
            with pytest.raises(AgentGone, match="handed over"):
                await request()


async def list_nothing(client: AgentClient) -> None:
    await client.list("/", recursive=False, max_entries=1)


async def test_a_client_with_an_open_request_is_not_detached_and_goes_on():
    async with started() as (guest, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(list_nothing, client)
            await until(lambda: guest.held)
            with pytest.raises(RequestRefused, match="not answered all requests"):
                await client.detach()
            await guest.answer_held()
        assert await counted(client) == "1\n"
        await client.detach()


async def test_a_client_with_a_run_is_not_detached():
    async with started() as (_, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        async with client.run(RunCode("forever")) as run:
            with pytest.raises(RequestRefused):
                await client.detach()
            await run.stop()
            await run.wait_finished()
        await client.detach()


async def test_a_cancelled_request_prevents_detaching_until_it_is_answered():
    async with started() as (guest, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(list_nothing, client)
            await until(lambda: guest.held)
            tasks.cancel_scope.cancel()
        with pytest.raises(RequestRefused):
            await client.detach()
        await guest.answer_held()
        await client.ping()
        await client.detach()


async def test_a_request_that_was_never_sent_does_not_prevent_detaching():
    async with started() as (_, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        async with anyio.create_task_group() as tasks, client._channel._sending:  # another frame is being sent
            tasks.start_soon(client.ping)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await client.detach()


async def test_half_a_frame_that_was_received_is_handed_over():
    async with started() as (_, stream):
        ours, theirs = [await SocketStream.from_socket(end) for end in socket.socketpair()]
        _, state = await detached(stream)
        number = state.last_id + 1
        answer = encode({"id": number, "ok": True})
        async with theirs:
            async with AgentClient.adopt(ours, state, timeout_s=TIMEOUT_S) as client:
                await theirs.send(answer[:20])
                await until(lambda: client._channel._decoder.incomplete)
                _, state = await client.detach()
            assert state.unread == answer[:20]
            async with AgentClient.adopt(ours, copied(state), timeout_s=TIMEOUT_S) as client:
                await theirs.send(answer[20:])
                await client.ping()


async def test_bytes_that_arrive_between_two_clients_are_read_by_the_second():
    ours, theirs = [await SocketStream.from_socket(end) for end in socket.socketpair()]
    async with started() as (_, stream), theirs:
        _, state = await detached(stream)
        await theirs.send(b"not a frame")
        with pytest.raises(ProtocolError):
            async with AgentClient.adopt(ours, state, timeout_s=TIMEOUT_S) as client:
                await client.ping()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"unread": b"not a frame"},
        lambda state: {"unread": encode({"id": state.last_id, "ok": True})},
        lambda state: {"hello": {**state.model_dump()["hello"], "version": 7}},
    ],
)
async def test_an_invalid_state_is_refused_and_the_stream_is_closed(
    change: Callable[[AgentState], dict[str, Any]],
):
    async with started() as (_, stream):
        _, state = await detached(stream)
        state = AgentState.model_validate({**state.model_dump(), **change(state)})
        with pytest.raises(ProtocolError):
            async with AgentClient.adopt(stream, state, timeout_s=TIMEOUT_S):
                pytest.fail("adopted")
        with pytest.raises(anyio.ClosedResourceError):
            await stream.send(b"x")


async def test_an_agent_that_is_gone_cannot_be_handed_over():
    async with started() as (guest, stream), AgentClient.open(stream, timeout_s=TIMEOUT_S) as client:
        await guest._stream.aclose()
        await client.wait_failed()
        with pytest.raises(GuestError):
            await client.detach()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await anyio.lowlevel.checkpoint()
