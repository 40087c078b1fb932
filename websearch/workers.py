"""The worker processes of one machine: gives them jobs, and carries their connections to the bridge.

A machine opens streams of two kinds. One begins with a preface: a worker that waits for a job. Any other is a
connection of a job to the web; a token in its first request says of which.
"""

import base64
import json
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import anyio
import h11
from anyio.abc import ByteStream
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from guest.jobs import ANSWER, JOB, MAX_BODY, MAX_HEADER, MAX_JOB, PREFACE, TOKEN_USER
from websearch.access import Caller
from websearch.bridge import Bridge
from websearch.http_peer import MAX_HEAD
from websearch.jobs import Answer, JobFailed

FIRST_BYTES_S = 15.0  # for a stream to say what it is
WORKER_S = 60.0  # for a worker to become free: after so long with a free place, the machine makes none any more
MAX_JOBS = 6  # that a machine does at once: see guest.web.workers.MOST
OWNER_JOBS = 4  # of them for one owner, so that slow pages of one do not keep out all others
PATIENCE = 0.5  # the part of its time that a job has for sure; then it ends if others wait for its place
TOKEN_BYTES = 16
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
NO_TOKEN = b"HTTP/1.1 407 no job of ours\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HEADER = TypeAdapter(dict[str, Any])

OpenBridge = Callable[[str], Bridge]  # called for each connection of a job, with the kind of the job


class WorkerLost(Exception):
    """A worker ended before it sent its answer, or none came."""

    def __init__(self, message: str = "the process that did it died") -> None:
        super().__init__(message)


class NoWorker(WorkerLost):
    """No worker became free in time."""

    def __init__(self) -> None:
        super().__init__("no process was free in time")


class JobOverdue(JobFailed):
    """A worker did not answer in time, not even that it needs longer."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("timeout", f"it took longer than {timeout_s:g} s")


class JobInTheWay(JobFailed):
    """A worker had half of its time, and other jobs waited for its place."""

    def __init__(self) -> None:
        super().__init__("in_the_way", "it took so long that others had to wait")


class _Error(BaseModel):
    """Why a worker says that its job failed."""

    model_config = ConfigDict(extra="allow")

    code: str = Field(pattern=r"^[a-z_]{1,40}$")
    message: str = Field(max_length=1000)


@dataclass(eq=False)
class _Worker:
    """A process that waits for a job on its stream, then answers."""

    stream: ByteStream
    has_job: bool = False
    result: Answer | JobFailed | WorkerLost = field(default_factory=WorkerLost)
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def attend(self, max_body: int) -> None:
        """Receive what the process sends. Only this task does, so that the end of a waiting process is noticed."""
        try:
            with self.scope:
                self.result = await self._receive(max_body)
        except JobFailed as error:
            self.result = error
        except GONE:
            pass
        finally:
            self.done.set()

    async def _receive(self, max_body: int) -> Answer:
        data = bytearray()

        async def fill(size: int) -> None:
            while len(data) < size:
                data.extend(await self.stream.receive())
                if not self.has_job:
                    raise JobFailed("worker", "a worker answers before it has a job")

        await fill(ANSWER.size)
        header_size, body_size = ANSWER.unpack_from(data)
        if header_size > MAX_HEADER or body_size > max_body:
            raise JobFailed("worker", "the worker's answer is too large")
        body = ANSWER.size + header_size
        await fill(body)
        header = _parse_header(bytes(data[ANSWER.size : body]))
        await fill(body + body_size)
        return Answer(header, bytes(data[body : body + body_size]))


@dataclass(eq=False)
class _Ticket:
    """A job's right to reach the web, as long as it lasts, and how long that is."""

    caller: Caller
    kind: str  # of the job
    end: float
    patient_until: float  # then it ends if it is in the way of others
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    in_the_way: bool = False
    connections: set[anyio.CancelScope] = field(default_factory=set)


def _oldest(tickets: Sequence[_Ticket], queued: int, places: int) -> Sequence[_Ticket]:
    """Return the oldest tickets, one for each job that is queued and for which there is no free place."""
    return tickets[: max(0, queued - (places - len(tickets)))]


class Workers:
    """The workers of one machine."""

    def __init__(self, open_bridge: OpenBridge, *, max_body: int = MAX_BODY) -> None:
        self._open_bridge = open_bridge
        self._max_body = max_body
        self._waiting: deque[_Worker] = deque()
        self._arrived = anyio.Event()
        self._tickets: dict[str, _Ticket] = {}
        self._queued: Counter[str | None] = Counter()  # jobs that wait for a place of their owner, or None: for any
        self._places: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()  # of each owner who has jobs
        self._missed_since: float | None = None  # when a job began to wait; no worker has arrived since
        self._ended = 0.0  # when the last job did

    @property
    def stuck(self) -> bool:
        """Whether jobs found no worker for long, although there is room for more."""
        if self._missed_since is None or len(self._tickets) >= MAX_JOBS:
            return False
        return anyio.current_time() - max(self._missed_since, self._ended) >= WORKER_S

    async def serve(self, stream: ByteStream) -> None:
        """Serve one stream of the machine."""
        try:
            with anyio.fail_after(FIRST_BYTES_S):
                first = await stream.receive()
                while len(first) < len(PREFACE) and PREFACE.startswith(first):
                    first += await stream.receive()
        except (*GONE, TimeoutError):
            return
        if first == PREFACE:
            worker = _Worker(stream)
            self._waiting.append(worker)
            self._missed_since = None
            self._arrived.set()
            self._arrived = anyio.Event()
            try:
                await worker.attend(self._max_body)
            finally:
                with suppress(ValueError):  # it ended before it got a job
                    self._waiting.remove(worker)
        else:
            await self._carry(_Replayed(first, stream))

    async def run(self, kind: str, fields: Mapping[str, Any], *, caller: Caller, timeout_s: float) -> Answer:
        """Give a job to the next worker and return its answer, in a time that includes the wait for the worker.

        Raises:
            WorkerLost: the worker ended, or none came.
            JobFailed: the worker says that it failed, or answers nonsense.
        """
        end = anyio.current_time() + timeout_s
        places = self._places.setdefault(caller.owner, anyio.Semaphore(OWNER_JOBS, fast_acquire=True))
        await self._acquire(places, caller.owner, timeout_s)
        try:
            worker = await self._waiting_worker(end - anyio.current_time())
            left = max(end - anyio.current_time(), 0.0)
            ticket = _Ticket(caller, kind, end, end - (1 - PATIENCE) * left)
            with self._valid(ticket) as token:
                job = {**fields, "kind": kind, "timeout_s": left, "token": token}
                return await self._answer(worker, job, ticket, timeout_s)
        finally:
            places.release()

    async def _acquire(self, places: anyio.Semaphore, owner: str, longest_s: float) -> None:
        """Take a place of this owner. Raises NoWorker if none becomes free in time."""
        try:
            places.acquire_nowait()
        except anyio.WouldBlock:
            with self._queuing(owner), anyio.move_on_after(min(WORKER_S, longest_s)):
                await places.acquire()
                return
            raise NoWorker from None

    async def _answer(self, worker: _Worker, job: Mapping[str, Any], ticket: _Ticket, timeout_s: float) -> Answer:
        worker.has_job = True
        try:
            with ticket.scope:
                await worker.stream.send(_packed(job))
                await worker.done.wait()
            if ticket.scope.cancelled_caught:
                raise JobInTheWay if ticket.in_the_way else JobOverdue(timeout_s)
        except GONE as error:
            raise WorkerLost from error
        finally:
            worker.scope.cancel()
        if isinstance(worker.result, Exception):
            raise worker.result
        return worker.result

    async def _waiting_worker(self, longest_s: float) -> _Worker:
        """Return a worker that waits. Raises NoWorker if none comes in time."""
        if self._waiting:
            return self._waiting.popleft()
        if self._missed_since is None:
            self._missed_since = anyio.current_time()
        with self._queuing(None), anyio.move_on_after(min(WORKER_S, longest_s)):
            while not self._waiting:
                await self._arrived.wait()
            return self._waiting.popleft()
        raise NoWorker

    @contextmanager
    def _queuing(self, owner: str | None) -> Iterator[None]:
        """Count a job that waits for a place of its owner, or without one for any place in the machine."""
        self._queued[owner] += 1
        self._make_room()
        try:
            yield
        finally:
            self._queued -= Counter({owner: 1})  # which forgets an owner with none left
            self._make_room()

    def _make_room(self) -> None:
        """Give the oldest jobs only their patient time, as many as there are others that wait for their places."""
        tickets = list(self._tickets.values())  # in the order in which they began
        in_the_way = set(_oldest(tickets, self._queued[None], MAX_JOBS))
        for owner in {ticket.caller.owner for ticket in tickets}:
            own = [ticket for ticket in tickets if ticket.caller.owner == owner]
            in_the_way.update(_oldest(own, self._queued[owner], OWNER_JOBS))
        for ticket in tickets:
            ticket.in_the_way = ticket in in_the_way
            ticket.scope.deadline = ticket.patient_until if ticket.in_the_way else ticket.end

    @contextmanager
    def _valid(self, ticket: _Ticket) -> Iterator[str]:
        """Let connections with the token that is yielded reach the web on behalf of a caller; then end them."""
        token = secrets.token_hex(TOKEN_BYTES)
        self._tickets[token] = ticket
        self._make_room()
        try:
            yield token
        finally:
            del self._tickets[token]
            self._make_room()
            self._ended = anyio.current_time()
            for connection in ticket.connections:
                connection.cancel()

    async def _carry(self, stream: "_Replayed") -> None:
        """Carry a connection of a job to the web."""
        try:
            with anyio.fail_after(FIRST_BYTES_S):
                token = await _token_of(stream)
        except (*GONE, TimeoutError, h11.RemoteProtocolError):
            return
        ticket = self._tickets.get(token or "")
        if ticket is None:
            with suppress(*GONE):
                await stream.send(NO_TOKEN)
                await stream.send_eof()
            return
        with anyio.CancelScope() as scope:
            ticket.connections.add(scope)
            try:
                await self._open_bridge(ticket.kind).serve(stream, ticket.caller)
            finally:
                ticket.connections.discard(scope)


class _Replayed(ByteStream):
    """A stream whose first bytes were read already, and are read once more."""

    def __init__(self, first: bytes, stream: ByteStream) -> None:
        self.first = first
        self._stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self.first:
            data, self.first = self.first[:max_bytes], self.first[max_bytes:]
            return data
        return await self._stream.receive(max_bytes)

    async def peek_more(self) -> bytes:
        """Return the next bytes, which will be read once more."""
        data = await self._stream.receive()
        self.first += data
        return data

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _token_of(stream: _Replayed) -> str | None:
    """Return the token in the first request of a connection, which stays unread."""
    peek = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    peek.receive_data(stream.first)
    while (event := peek.next_event()) is h11.NEED_DATA:
        peek.receive_data(await stream.peek_more())
    headers = dict(event.headers) if isinstance(event, h11.Request) else {}
    scheme, _, credentials = headers.get(b"proxy-authorization", b"").partition(b" ")
    try:
        user, _, token = base64.b64decode(credentials).decode("ascii").partition(":")
    except ValueError:
        return None
    return token if scheme.lower() == b"basic" and user == TOKEN_USER else None


def _packed(job: Mapping[str, Any]) -> bytes:
    content = json.dumps(job).encode()
    if len(content) > MAX_JOB:
        raise JobFailed("worker", "the job is too large")
    return JOB.pack(len(content)) + content


def _parse_header(packed: bytes) -> dict[str, Any]:
    """Return a worker's header. Raises JobFailed if it says so, or is none."""
    try:
        header = HEADER.validate_json(packed)
        error = _Error.model_validate(header["error"]) if "error" in header else None
    except ValidationError as nonsense:
        raise JobFailed("worker", "the worker's answer is nonsense") from nonsense
    if error is not None:
        raise JobFailed(error.code, error.message, error.model_extra)
    return header
