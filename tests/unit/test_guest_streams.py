"""Streams from a machine to its host: the agent's real tunnel against the host's real end, without a machine."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from types import SimpleNamespace

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from guest.agent import tunnel
from guest.agent.loop import Link, Loop
from guest.client.channel import Channel
from guest.client.streams import MAX_WINDOW, SPARE, GuestStream, ServeStream, Streams
from guest.errors import AgentGone, ProtocolError, RequestRefused
from guest.protocol import Frame, encode
from guest.streams import (
    CHUNK,
    GUEST_WINDOW,
    LEAST_GUEST_WINDOW,
    MAX_HOST_STREAMS,
    MAX_STREAMS,
    OPEN_BURST,
    OPENS_PER_S,
    WINDOW,
    OpenRate,
)
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio

MANY = 50  # streams at once


class Agent:
    """The part of an agent that carries streams, in a thread."""

    def __init__(self, channel: socket.socket) -> None:
        self.loop = Loop()
        self.link = Link(self.loop, None, lambda frame: self.tunnel.take(*frame), self.loop.stop)
        self.tunnel = tunnel.Tunnel(self.loop, self.link)
        fd = channel.detach()
        self.link.attach((fd, fd))
        self.tunnel.listen()

    def run(self) -> None:
        self.loop.run()
        self.tunnel.close()
        self.link.close()


@pytest.fixture
def place(tmp_path, monkeypatch) -> str:
    """Where the tunnel listens: a free port, and a socket of this test."""
    monkeypatch.setattr(tunnel, "PORT", 0)
    monkeypatch.setattr(tunnel, "SOCKET", str(tmp_path / "proxy.sock"))
    return str(tmp_path / "proxy.sock")


@asynccontextmanager
async def machine(serve: ServeStream | None) -> AsyncIterator[Channel]:
    """Run a tunnel whose streams `serve` takes on the host; without it, the machine may open none."""
    ours, theirs = socket.socketpair()
    agent = Agent(theirs)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        with anyio.fail_after(HANG_S):
            async with await SocketStream.from_socket(ours) as stream, anyio.create_task_group() as tasks:
                channel = Channel(stream, HANG_S)
                if serve is not None:
                    channel.streams.allow(tasks, serve)
                tasks.start_soon(channel.read)
                yield channel
                tasks.cancel_scope.cancel()
    finally:
        await anyio.to_thread.run_sync(thread.join)


async def echo(stream: ByteStream) -> None:
    async for data in stream:
        await stream.send(data)
    await stream.send_eof()


async def read_all(stream: ByteStream) -> bytes:
    return b"".join([data async for data in stream])


async def test_a_connection_in_the_machine_is_a_stream_on_the_host(place):
    async with machine(echo), await anyio.connect_unix(place) as peer:
        await peer.send(b"hello")
        await peer.send_eof()
        assert await read_all(peer) == b"hello"


async def test_more_bytes_than_a_window_come_through_both_ways(place):
    data = bytes(range(256)) * (WINDOW // 256) * 5
    async with machine(echo), await anyio.connect_unix(place) as peer, anyio.create_task_group() as tasks:

        async def send() -> None:
            await peer.send(data)
            await peer.send_eof()

        tasks.start_soon(send)
        assert await read_all(peer) == data


async def test_many_streams_are_carried_at_once(place):
    async with machine(echo), anyio.create_task_group() as tasks:

        async def exchange(number: int) -> None:
            async with await anyio.connect_unix(place) as peer:
                text = f"stream {number} ".encode() * 5000
                await peer.send(text)
                await peer.send_eof()
                assert await read_all(peer) == text

        for number in range(MAX_STREAMS + 20):  # the last ones wait for the first
            tasks.start_soon(exchange, number)


async def test_a_stream_that_the_host_does_not_read_holds_up_no_other(place):
    stuck = anyio.Event()
    streams: list[ByteStream] = []

    async def serve(stream: ByteStream) -> None:
        streams.append(stream)
        if len(streams) == 1:
            await stuck.wait()
        else:
            await echo(stream)

    async with machine(serve), await anyio.connect_unix(place) as stubborn, anyio.create_task_group() as tasks:
        tasks.start_soon(stubborn.send, b"x" * WINDOW * 10)
        while not streams:
            await anyio.lowlevel.checkpoint()
        async with await anyio.connect_unix(place) as peer:
            await peer.send(b"hello")
            await peer.send_eof()
            assert await read_all(peer) == b"hello"
        stuck.set()
        tasks.cancel_scope.cancel()


async def test_a_connection_that_the_machine_does_not_read_holds_up_no_other(place):
    async def flood_first(stream: ByteStream) -> None:
        if await stream.receive() == b"flood":
            await stream.send(b"x" * WINDOW * 10)
        else:
            await stream.send(b"answer")
            await stream.send_eof()

    async with machine(flood_first), await anyio.connect_unix(place) as stubborn:
        await stubborn.send(b"flood")
        async with await anyio.connect_unix(place) as peer:
            await peer.send(b"question")
            assert await read_all(peer) == b"answer"


@asynccontextmanager
async def uploads(place: str, count: int) -> AsyncIterator[list[int]]:
    """Send from `count` connections without end; yields what the host has received of each."""
    received: list[int] = []

    async def serve(stream: ByteStream) -> None:
        number = len(received)
        received.append(0)
        async for data in stream:
            received[number] += len(data)

    async def send_for_ever() -> None:
        async with await anyio.connect_unix(place) as peer:
            while True:
                await peer.send(bytes(CHUNK))

    async with machine(serve), anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(send_for_ever)
        yield received
        tasks.cancel_scope.cancel()


async def test_streams_that_open_first_take_nothing_from_those_that_open_last(place):
    """Fails if the streams that wait for a slow host do not take turns, or if the first ones keep wider windows."""
    async with uploads(place, MANY) as received:
        while sum(received) < MANY * 2**20:
            await anyio.lowlevel.checkpoint()
        assert min(received) * len(received) >= sum(received) / 2
        assert len(received) == MANY


async def test_connections_that_nothing_reads_hold_equal_shares(place):
    """A stream that opened while it was alone must not have taken so much that those after it come late."""
    sent: list[int] = []

    async def flood(stream: ByteStream) -> None:
        number = len(sent)
        sent.append(0)
        with suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(bytes(CHUNK))
                sent[number] += CHUNK

    async with machine(flood), AsyncExitStack() as peers:
        for _ in range(MANY):
            peer = await peers.enter_async_context(await anyio.connect_unix(place))
            await peer.receive(1)
        before = -1
        while sum(sent) != before:  # until all are stuck: a round trip later, nothing more was sent
            before = sum(sent)
            async with await anyio.connect_unix(place) as peer:
                await peer.receive(1)
            sent.pop()
        assert max(sent) <= GUEST_WINDOW + 2 * tunnel.SEND_BUFFER
        assert sorted(sent)[MANY // 2] <= LEAST_GUEST_WINDOW + 2 * tunnel.SEND_BUFFER


async def test_a_stream_that_was_quiet_while_many_others_opened_goes_on(place):
    """What the machine has used while the stream was alone must not count against its smaller share."""
    first = 3 * CHUNK  # less than half of what one stream may have on the way, more than all of what each of many may
    opened: list[ByteStream] = []
    all_open = anyio.Event()

    async def serve(stream: ByteStream) -> None:
        opened.append(stream)
        if len(opened) == 1:
            await stream.send(bytes(first))
            await all_open.wait()
            await stream.send(b"more")
            await stream.send_eof()
        elif len(opened) == MANY:
            all_open.set()
        await stream.receive()

    async with machine(serve), await anyio.connect_unix(place) as quiet, AsyncExitStack() as others:
        received = 0
        while received < first:
            received += len(await quiet.receive())
        for _ in range(MANY - 1):
            await others.enter_async_context(await anyio.connect_unix(place))
        assert await read_all(quiet) == b"more"


async def test_a_window_that_grew_while_a_stream_was_alone_shrinks_when_others_open():
    given = [0]

    async def send(frame: dict[str, int], _body: bytes) -> None:
        given.append(frame.get("bytes", 0))

    opened: list[GuestStream] = []

    async def serve(stream: ByteStream) -> None:
        assert isinstance(stream, GuestStream)
        opened.append(stream)
        await anyio.sleep_forever()

    async def use(size: int) -> None:
        for _ in range(size // CHUNK):
            streams.take(Frame(header(1, "data"), bytes(CHUNK)))
            await opened[0].receive()

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        streams.allow(tasks, serve)
        streams.take(Frame(header(1, "open"), b""))
        await anyio.wait_all_tasks_blocked()
        await use(WINDOW)
        assert opened[0].window == MAX_WINDOW
        for number in range(2, MAX_STREAMS + 1):
            streams.take(Frame(header(number, "open"), b""))
        await use(MAX_WINDOW)
        assert opened[0].window == WINDOW + SPARE // MAX_STREAMS
        for number in range(2, MAX_STREAMS + 1):
            streams.take(Frame(header(number, "reset"), b""))
        await use(WINDOW)
        assert opened[0].window == MAX_WINDOW
        tasks.cancel_scope.cancel()


async def test_a_stream_that_stays_alone_may_send_more_again():
    sent = 0

    async def send(_frame: dict[str, object], body: bytes) -> None:
        nonlocal sent
        sent += len(body)

    async def flood(stream: ByteStream) -> None:
        with suppress(anyio.BrokenResourceError):
            await stream.send(bytes(2 * GUEST_WINDOW))

    async def wait(stream: ByteStream) -> None:
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        streams.allow(tasks, wait)
        for number in range(1, MAX_STREAMS):
            streams.take(Frame(header(number, "open"), b""))
        streams.allow(tasks, flood)
        streams.take(Frame(header(MAX_STREAMS, "open"), b""))
        await anyio.wait_all_tasks_blocked()
        assert sent == LEAST_GUEST_WINDOW
        for number in range(1, MAX_STREAMS):
            streams.take(Frame(header(number, "reset"), b""))
        await anyio.wait_all_tasks_blocked()
        assert sent == GUEST_WINDOW
        tasks.cancel_scope.cancel()


async def test_a_stream_that_the_host_gives_up_ends_in_the_machine(place):
    async def refuse(stream: ByteStream) -> None:
        await stream.receive()

    async with machine(refuse), await anyio.connect_unix(place) as peer:
        await peer.send(b"hello")
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await peer.receive()


async def test_a_connection_that_ends_in_the_machine_ends_on_the_host(place):
    ended = anyio.Event()

    async def serve(stream: ByteStream) -> None:
        try:
            while True:
                await stream.send(b"x" * CHUNK)
        except anyio.BrokenResourceError:
            ended.set()

    async with machine(serve):
        peer = await anyio.connect_unix(place)
        await peer.receive()
        await peer.aclose()
        await ended.wait()


async def test_streams_can_be_closed_before_a_freeze(place):
    opened = anyio.Event()

    async def wait(stream: ByteStream) -> None:
        opened.set()
        await stream.receive()

    async with machine(wait) as channel, await anyio.connect_unix(place) as peer:
        await opened.wait()
        assert await channel.streams.close() == 1
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await peer.receive()
        assert await channel.streams.close() == 0


async def test_a_server_that_fails_ends_its_stream_only(place, caplog):
    async def fail(stream: ByteStream) -> None:
        if await stream.receive() == b"bad":
            raise ValueError("a bug")
        await stream.send(b"good")
        await stream.send_eof()

    async with machine(fail):
        async with await anyio.connect_unix(place) as peer:
            await peer.send(b"bad")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await peer.receive()
        async with await anyio.connect_unix(place) as peer:
            await peer.send(b"fine")
            assert await read_all(peer) == b"good"
    assert "could not be served" in caplog.text


# -------------------------------------------------------------------- streams that the host opens


@pytest.fixture
async def port(anyio_backend: str) -> AsyncIterator[int]:
    """The port of a server in the machine that sends back what it gets."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


async def answer(stream: ByteStream) -> None:
    async with stream:
        await echo(stream)


async def test_the_host_connects_to_a_port_of_a_machine_that_may_open_no_stream(place, port):
    data = bytes(range(256)) * 8000
    async with machine(None) as channel:
        async with await channel.streams.connect(port, HANG_S) as stream, anyio.create_task_group() as tasks:

            async def send() -> None:
                await stream.send(data)
                await stream.send_eof()

            tasks.start_soon(send)
            assert await read_all(stream) == data
        assert await channel.streams.close() == 0


async def test_a_port_where_nothing_listens_is_refused(place):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        unused = listening.getsockname()[1]
    async with machine(None) as channel:
        with pytest.raises(RequestRefused, match=f"nothing listens on its port {unused}"):
            await channel.streams.connect(unused, HANG_S)
        assert await channel.streams.close() == 0


async def test_the_host_opens_so_many_streams_and_they_count_against_no_limit_of_the_machine(place, port):
    async with machine(echo) as channel, AsyncExitStack() as stack:
        for _ in range(MAX_HOST_STREAMS):
            await stack.enter_async_context(await channel.streams.connect(port, HANG_S))
        with pytest.raises(RequestRefused, match="open already"):
            await channel.streams.connect(port, HANG_S)
        async with await anyio.connect_unix(place) as peer:
            await peer.send(b"hello")
            await peer.send_eof()
            assert await read_all(peer) == b"hello"


FORGED = {
    "data before the stream is connected": [("data", -1)],
    "an end before the stream is connected": [("end", -1)],
    "a connection twice": [("opened", -1), ("opened", -1)],
    "a connection that the host has not asked for": [("opened", -2)],
    "a stream with a number of the host": [("open", -1)],
    "a stream of its own": [("open", 1)],
}


@pytest.mark.parametrize("what", FORGED)
async def test_what_a_machine_without_a_network_makes_of_a_stream_of_the_host_breaks_the_channel(what):
    async def send(_header: dict[str, object], _body: bytes) -> None:
        pass

    async def connect() -> None:
        with suppress(RequestRefused):
            await streams.connect(80, HANG_S)

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        tasks.start_soon(connect)
        await anyio.wait_all_tasks_blocked()
        *allowed, last = FORGED[what]
        for do, number in allowed:
            streams.take(Frame(header(number, do), b""))
        with pytest.raises(ProtocolError):
            streams.take(Frame(header(last[1], last[0]), b"x"))
        tasks.cancel_scope.cancel()


# -------------------------------------------------------------------- hostile agents


def header(number: object, what: object, **fields: object) -> dict[str, object]:
    return {"stream": number, "do": what, **fields}


HOSTILE = {
    "a stream number that is no number": [header("1", "open")],
    "a stream number that is a boolean": [header(True, "open")],
    "a negative stream number": [header(-1, "open")],
    "stream zero": [header(0, "open")],
    "data before an open": [header(7, "data")],
    "a window before an open": [header(7, "window", bytes=1)],
    "opening a stream twice": [header(1, "open"), header(1, "open")],
    "opening an older stream": [header(5, "open"), header(4, "open")],
    "something unknown": [header(1, "open"), header(1, "dance")],
    "nothing at all": [header(1, "open"), header(1, None)],
    "data after the end": [header(1, "open"), header(1, "end"), header(1, "data")],
    "two ends": [header(1, "open"), header(1, "end"), header(1, "end")],
    "a window of zero": [header(1, "open"), header(1, "window", bytes=0)],
    "a negative window": [header(1, "open"), header(1, "window", bytes=-1)],
    "a window that is no number": [header(1, "open"), header(1, "window", bytes="9")],
    "a window without a size": [header(1, "open"), header(1, "window")],
    "a huge window": [header(1, "open"), header(1, "window", bytes=2**63)],
    "a window beyond what was sent": [header(1, "open"), header(1, "window", bytes=1)],
    "more than a window": [header(1, "open"), *[header(1, "data")] * (WINDOW // CHUNK + 1)],
    "too many streams": [header(number, "open") for number in range(1, MAX_STREAMS + 2)],
    "opening and closing without end": [
        header(number, what) for number in range(1, OPEN_BURST * 3) for what in ("open", "reset")
    ],
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_frame_that_no_honest_agent_sends_breaks_the_channel(what):
    async def wait(stream: ByteStream) -> None:
        await anyio.sleep_forever()

    async def send(_header: dict[str, object], _body: bytes) -> None:
        pass

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        streams.allow(tasks, wait)
        *allowed, last = HOSTILE[what]
        with suppress(ProtocolError) if what.endswith("without end") else nullcontext():
            for each in allowed:
                streams.take(Frame(each, b"x" * CHUNK))
        with pytest.raises(ProtocolError):
            streams.take(Frame(last, b"x" * CHUNK))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("count", "grown"), [(1, MAX_WINDOW - WINDOW), (MAX_STREAMS, SPARE)])
async def test_windows_grow_with_what_is_read_and_all_together_stay_within_bounds(count, grown):
    """A few fast streams may have more on the way. The host keeps 15 MB of a machine's bytes at most."""
    given = dict.fromkeys(range(1, count + 1), WINDOW)

    async def send(frame: dict[str, int], _body: bytes) -> None:
        given[frame["stream"]] += frame.get("bytes", 0)

    opened: list[GuestStream] = []

    async def serve(stream: ByteStream) -> None:
        assert isinstance(stream, GuestStream)
        opened.append(stream)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        streams.allow(tasks, serve)
        for number in given:
            streams.take(Frame(header(number, "open"), b""))
        await anyio.wait_all_tasks_blocked()
        for _ in range(100):
            for number, stream in enumerate(opened, 1):
                streams.take(Frame(header(number, "data"), b"x" * CHUNK))
                given[number] -= CHUNK
                await stream.receive()
        assert sum(stream.window for stream in opened) == count * WINDOW + grown <= 15 * 2**20
        for number, stream in enumerate(opened, 1):
            assert given[number] <= stream.window
            for _ in range(given[number] // CHUNK):
                streams.take(Frame(header(number, "data"), b"x" * CHUNK))
            with pytest.raises(ProtocolError, match="more than a stream's window"):
                streams.take(Frame(header(number, "data"), b"x" * CHUNK))
        tasks.cancel_scope.cancel()


async def test_a_machine_without_a_network_may_open_no_stream():
    async def send(_header: dict[str, object], _body: bytes) -> None:
        pass

    with pytest.raises(ProtocolError, match="may not"):
        Streams(send).take(Frame(header(1, "open"), b""))


async def test_frames_of_a_stream_that_the_host_has_given_up_are_ignored():
    async def give_up(stream: ByteStream) -> None:
        await stream.aclose()

    sent = []

    async def send(frame: dict[str, object], _body: bytes) -> None:
        sent.append(frame["do"])

    async with anyio.create_task_group() as tasks:
        streams = Streams(send)
        streams.allow(tasks, give_up)
        streams.take(Frame(header(1, "open"), b""))
        while sent != ["reset"]:
            await anyio.lowlevel.checkpoint()
        streams.take(Frame(header(1, "data"), b"late"))
    assert sent == ["reset"]


async def test_an_open_stream_breaks_when_the_machine_is_gone():
    ours, theirs = socket.socketpair()
    outcome = []

    async def serve(stream: ByteStream) -> None:
        with pytest.raises(anyio.BrokenResourceError):
            await stream.receive()
        outcome.append("broken")

    with anyio.fail_after(HANG_S):
        async with await SocketStream.from_socket(ours) as stream, anyio.create_task_group() as tasks:
            channel = Channel(stream, HANG_S)
            channel.streams.allow(tasks, serve)
            theirs.send(encode(header(1, "open")))
            theirs.close()
            await channel.read()
    assert outcome == ["broken"]


@pytest.mark.parametrize("act", [lambda stream: stream.send(b"x"), lambda stream: stream.send_eof()])
async def test_sending_breaks_when_the_machine_is_gone(act):
    async def send(_header: dict[str, object], _body: bytes) -> None:
        raise AgentGone("the stream to the agent is closed")

    stream = GuestStream(1, send, lambda _number: None, lambda _window: 0)
    with pytest.raises(anyio.BrokenResourceError):
        await act(stream)
    await stream.aclose()


@pytest.fixture
def idle_agent(place) -> Iterator[Agent]:
    """An agent whose loop does not run: a test calls what the loop would."""
    ours, theirs = socket.socketpair()
    agent = Agent(theirs)
    yield agent
    agent.tunnel.close()
    agent.link.close()
    ours.close()


def test_looking_for_connections_that_do_not_come_costs_none_of_the_rate(idle_agent, place, monkeypatch):
    monkeypatch.setattr(tunnel, "time", SimpleNamespace(monotonic=lambda: 0.0))  # so that the rate does not recover
    idle_agent.tunnel._rate = OpenRate(0.0)
    *_, listening = idle_agent.tunnel._listening
    for _ in range(2 * OPEN_BURST):
        idle_agent.tunnel._accept(listening)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(place)
        idle_agent.tunnel._accept(listening)
        assert len(idle_agent.tunnel._open) == 1


def test_a_tunnel_that_opened_too_often_waits_with_one_timer_for_each_socket(idle_agent, monkeypatch):
    monkeypatch.setattr(idle_agent.tunnel._rate, "take", lambda _now: False)
    for _ in range(10):
        for listening in idle_agent.tunnel._listening:
            idle_agent.tunnel._accept(listening)
    assert len(idle_agent.loop._timers) == len(idle_agent.tunnel._listening)
    for _, _, action in idle_agent.loop._timers.copy():
        action()
    assert len(idle_agent.loop._timers) == 2 * len(idle_agent.tunnel._listening)  # they ask again


def test_openings_have_a_rate():
    rate = OpenRate(0.0)
    assert [rate.take(0.0) for _ in range(OPEN_BURST + 1)] == [True] * OPEN_BURST + [False]
    assert [rate.take(1.0) for _ in range(OPENS_PER_S + 1)] == [True] * OPENS_PER_S + [False]
