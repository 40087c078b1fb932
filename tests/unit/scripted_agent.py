"""A client whose agent follows a script: hostile, slow, broken or gone."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio.streams.stapled import StapledObjectStream

from guest.client import AgentClient
from guest.client.messages import RunCode
from guest.protocol import PROTOCOL_VERSION, Decoder, Frame, encode

TIMEOUT_S = 20.0
DONE: dict[str, Any] = {
    "ok": True,
    "status": "ok",
    "state": "kept",
    "exit_code": 0,
    "output": {"stdout_bytes": 0, "stderr_bytes": 0, "spill_complete": True, "displays_dropped": 0},
}


class Pipe:
    """One end of an in-memory byte stream."""

    def __init__(self, stream: StapledObjectStream[bytes]) -> None:
        self._stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stream.receive()

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FakeAgent:
    """The machine's end: answers hello, then follows the test."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.decoder = Decoder()
        self.waiting: list[Frame] = []

    async def next(self) -> Frame:
        while not self.waiting:
            self.waiting = self.decoder.feed(await self.pipe.receive())
        return self.waiting.pop(0)

    async def expect(self, op: str) -> int:
        frame = await self.next()
        assert frame.header["op"] == op
        number = frame.header["id"]
        assert isinstance(number, int)
        return number

    async def reply(self, number: Any, header: dict[str, Any], body: bytes = b"") -> None:
        await self.pipe.send(encode({"id": number, **header}, body))

    async def greet(self, **changes: Any) -> None:
        frame = await self.next()
        answer = {
            "ok": True,
            "version": PROTOCOL_VERSION,
            "nonce": frame.header["nonce"],
            "agent": "x",
            "language": "python",
        }
        await self.reply(frame.header["id"], {**answer, "language_version": "3", **changes})


Script = Callable[[FakeAgent], Awaitable[None]]


@asynccontextmanager
async def connected(
    script: Script, *, greet: bool = True, timeout_s: float = TIMEOUT_S, seeking: bool = False
) -> AsyncIterator[AgentClient]:
    """A client whose agent follows a script."""
    to_guest, from_host = anyio.create_memory_object_stream[bytes](100)
    to_host, from_guest = anyio.create_memory_object_stream[bytes](100)
    ours = Pipe(StapledObjectStream(to_guest, from_guest))
    agent = FakeAgent(Pipe(StapledObjectStream(to_host, from_host)))

    async def play() -> None:
        try:
            if greet:
                await agent.greet()
            await script(agent)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            pass  # the client has left

    failure: BaseException | None = None
    with anyio.fail_after(TIMEOUT_S):
        async with anyio.create_task_group() as tasks, agent.pipe:
            tasks.start_soon(play)
            try:
                async with AgentClient.open(ours, timeout_s=timeout_s, seeking=seeking) as client:  # type: ignore[arg-type]
                    yield client
            except BaseException as error:  # raised outside of the task group, which would wrap it
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def forever(_agent: FakeAgent) -> None:
    await anyio.sleep_forever()


async def collect(client: AgentClient, request: RunCode) -> list[object]:
    async with client.run(request) as run:
        return [event async for event in run]
