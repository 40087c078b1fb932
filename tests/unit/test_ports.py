"""A connection to a port of a sandbox over a WebSocket: when it ends."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.rest.ports import END, _carry

DISCONNECT = {"type": "websocket.disconnect"}


class Silent(ByteStream):
    """A server in a sandbox that reads everything and answers when it is told to."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.ended = anyio.Event()
        self.answer = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await self.answer.wait()
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        self.received.append(item)

    async def send_eof(self) -> None:
        self.ended.set()

    async def aclose(self) -> None: ...


class Client:
    """A client that sends these messages and then stays, unless the last one is that it has gone."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self._messages = list(messages)
        self.sent: list[str] = []

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            await anyio.sleep_forever()
        return self._messages.pop(0)

    async def send_text(self, text: str) -> None:
        self.sent.append(text)


async def carry(client: Client, stream: Silent) -> None:
    with anyio.fail_after(5):
        await _carry(client, stream)  # type: ignore[arg-type]


async def test_a_client_that_is_gone_after_its_end_ends_the_connection():
    stream = Silent()
    await carry(Client([{"bytes": b"GET", "type": ""}, {"text": END, "type": ""}, DISCONNECT]), stream)
    assert (stream.received, stream.ended.is_set()) == ([b"GET"], True)


async def test_a_connection_ends_when_both_directions_have():
    stream = Silent()
    stream.answer.set()
    client = Client([{"text": END, "type": ""}])
    await carry(client, stream)
    assert client.sent == [END]


@pytest.mark.parametrize("messages", [[], [{"bytes": b"x", "type": ""}]])
async def test_a_connection_stays_while_the_client_may_send_more(messages: list[dict[str, Any]]):
    stream = Silent()
    stream.answer.set()
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        await _carry(Client(messages), stream)  # type: ignore[arg-type]
