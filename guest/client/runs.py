"""One run as the host sees it: its events, a way to stop it, and a limit on what it makes the host keep."""

import codecs
from collections import deque
from collections.abc import Awaitable, Callable
from typing import get_args

import anyio

from guest.client import parsing
from guest.client.messages import Artifact, Display, Event, Finished, Output, RunCode, Stream
from guest.client.reports import MAX_REPORT_BYTES, parse_report
from guest.errors import AgentGone, GuestError, ProtocolError, RequestRefused
from guest.protocol import MAX_ARTIFACTS, MAX_BODY, MAX_DISPLAYS, MAX_HEADER, Frame
from guest.stdin import CHUNK, WINDOW

QUEUE_ENTRY_BYTES = 512  # memory of an unread event besides its text
QUEUE_SLACK_BYTES = 8 * 1024 * 1024  # unread events beyond the output itself: artifacts, many short prints
MERGE_BELOW_CHARS = 16 * 1024  # unread output shorter than this is merged with what follows it


Write = Callable[[bytes, bool], Awaitable[None]]  # sends input of the run; True: it is the last


class _Text:
    """Decodes the bytes of one stream without splitting a character between two events."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, data: bytes, *, after_gap: bool) -> str:
        if not after_gap:
            return self._decoder.decode(data)
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        cut = 0  # the first bytes after a gap may be the end of a character whose start was left out
        while cut < min(3, len(data)) and data[cut] & 0xC0 == 0x80:
            cut += 1
        return rest + self._decoder.decode(data[cut:])

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Run:
    """An async iterator of the events of one run; the last one is `Finished`.

    Events are queued until they are read, so a slow reader never holds up other requests on the stream. The queue is
    bounded: output and displays by what the request allows, the rest by a fixed slack. An agent that sends more breaks
    the protocol.
    """

    def __init__(self, request: RunCode, stop: Callable[[], Awaitable[None]], write: Write) -> None:
        self.request = request
        self.finished: Finished | None = None
        self.stdin_open = request.stdin_open  # it takes input
        self._send_stop = stop
        self._send_input = write
        self._credit = 0  # bytes of input that the machine takes
        self._more_credit = anyio.Event()
        self._events: deque[Event] = deque()
        self._news = anyio.Event()
        self._failure: GuestError | None = None
        self._texts: dict[str, _Text] = {name: _Text() for name in get_args(Stream)}
        self._output_left = 2 * (request.head_bytes + request.tail_bytes) + 2
        self._display_left = request.max_display_bytes
        self._displays_left = MAX_DISPLAYS
        self._artifacts_left = MAX_ARTIFACTS
        self._reported = False
        self._queue_left = (
            self._output_left + self._display_left + MAX_BODY + MAX_HEADER + MAX_REPORT_BYTES + QUEUE_SLACK_BYTES
        )

    async def stop(self) -> None:
        """Interrupt the code, and kill its process if it still runs after the grace period.

        Returns when the agent has acknowledged it; the run still ends with `Finished`.
        """
        if self.finished is None:
            await self._send_stop()

    async def write(self, data: bytes) -> int:
        """Send the beginning of `data` as input once the run takes some; returns how much. 0: it takes no more.

        Raises:
            RequestRefused: nothing was sent; it can be tried again.
            GuestError: the machine is lost.
        """
        while self.stdin_open and not self._credit:
            await self._more_credit.wait()
        if not self.stdin_open:
            return 0
        size = min(len(data), self._credit, CHUNK)
        self._credit -= size
        try:
            with anyio.CancelScope(shield=True):  # else nobody would know what was sent
                await self._send_input(data[:size], False)
        except RequestRefused:
            self._add_credit(size)
            raise
        return size

    async def close_stdin(self) -> None:
        """Let the run find the end of its input. Raises as `write` does."""
        if self.stdin_open:
            with anyio.CancelScope(shield=True):
                await self._send_input(b"", True)
            self._end_input()

    def _end_input(self) -> None:
        self.stdin_open = False
        self._more_credit.set()

    def __aiter__(self) -> "Run":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.finished is not None:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._news = anyio.Event()
            await self._news.wait()
        event = self._events.popleft()
        self._queue_left += _cost(event)
        return event

    async def wait_finished(self) -> Finished:
        """Discard unread events and return how the run ended."""
        async for _ in self:
            pass
        if self.finished is None:
            raise self._failure or AgentGone("the run ended without a result")
        return self.finished

    def fail(self, error: GuestError) -> None:
        """End the run: no more events will come."""
        self._failure = error
        self._end_input()
        self._news.set()

    def take(self, frame: Frame) -> bool:
        """Take a frame; True if it was the last. Raises ProtocolError if it is not allowed."""
        header, body = frame
        if "ok" in header:
            for stream in get_args(Stream):
                if rest := self._texts[stream].end():
                    self._put(Output(stream, rest))
            if parsing.is_ok(frame):
                self._put(parsing.parse_finished(header, body))
            else:
                self.fail(parsing.parse_refusal(header))
            return True
        kind = header.get("event")
        if kind == "output":
            self._take_output(header, body)
        elif kind == "display":
            self._take_display(header, body)
        elif kind == "artifact":
            self._take_artifact(header)
        elif kind == "window" and self.request.stdin_open:
            self._open_window(header.get("bytes"))
        elif kind == "report" and not self._reported:
            self._reported = True
            self._take_report(body)
        else:
            raise ProtocolError(f"the agent sent an unknown event: {str(kind)[:60]!r}")
        return False

    def _open_window(self, size: object) -> None:
        if type(size) is not int or not 0 < size <= WINDOW - self._credit:
            raise ProtocolError("the agent opens the window of a run's input by nonsense")
        self._add_credit(size)

    def _add_credit(self, size: int) -> None:
        self._credit += size
        self._more_credit.set()
        self._more_credit = anyio.Event()

    def _take_output(self, header: dict[str, object], body: bytes) -> None:
        # Checked by hand: pydantic would double the cost of an event, and a chatty run has many thousands of them.
        stream, gap = header.get("stream"), header.get("gap", 0)
        if stream != "stdout" and stream != "stderr":
            raise ProtocolError(f"the agent sent output of an unknown stream: {str(stream)[:60]!r}")
        if type(gap) is not int or not 0 <= gap < 2**63:
            raise ProtocolError(f"the agent's gap in the output is not a size: {str(gap)[:60]!r}")
        self._output_left -= max(1, len(body))
        if self._output_left < 0:
            raise ProtocolError("the agent sent more output than the run allows")
        text = self._texts[stream].decode(body, after_gap=gap > 0)
        if text or gap:
            self._put(Output(stream, text, gap))

    def _take_report(self, body: bytes) -> None:
        """Take a report. One that makes no sense is dropped: the agent passes it on as the code wrote it, unread."""
        if len(body) > MAX_REPORT_BYTES:
            raise ProtocolError("the agent's report is too long")
        try:
            report = parse_report(body)
        except ProtocolError:
            return
        self._put(report)

    def _take_display(self, header: dict[str, object], body: bytes) -> None:
        self._display_left -= 0 if body == b"{}" else len(body)
        self._displays_left -= 1
        if self._display_left < 0 or self._displays_left < 0:  # before the body is parsed
            raise ProtocolError("the agent sent more displays than the run allows")
        self._put(parsing.parse_display(header, body))

    def _take_artifact(self, header: dict[str, object]) -> None:
        self._artifacts_left -= 1
        if self._artifacts_left < 0:
            raise ProtocolError("the agent sent more artifacts than the run allows")
        self._put(parsing.parse_artifact(header))

    def _put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, Output)
            and isinstance(last, Output)
            and last.stream == event.stream
            and not event.gap_bytes
            and len(last.text) < MERGE_BELOW_CHARS
        ):
            self._queue_left += _cost(last)
            event = Output(event.stream, last.text + event.text, last.gap_bytes)
            self._events[-1] = event
        else:
            self._events.append(event)
        self._queue_left -= _cost(event)
        if self._queue_left < 0:
            raise ProtocolError("the agent sent more events than the host keeps unread")
        if isinstance(event, Finished):
            self.finished = event
            self._end_input()
        self._news.set()


def _cost(event: Event) -> int:
    """Return roughly how much memory an unread event takes, in bytes."""
    if isinstance(event, Output):
        return QUEUE_ENTRY_BYTES + len(event.text)
    if isinstance(event, Finished):
        return 0
    if isinstance(event, Artifact):
        return QUEUE_ENTRY_BYTES + len(event.path)
    if isinstance(event, Display):
        return QUEUE_ENTRY_BYTES + sum(map(len, event.files)) + sum(map(len, event.data.values()))
    return MAX_REPORT_BYTES
