"""The one machine of a server that reaches the web: started on first use, watched, replaced, stopped when idle.

A machine that is replaced still finishes its jobs, while the next one serves new ones.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import anyio
from anyio import AsyncContextManagerMixin
from anyio.abc import TaskGroup  # noqa: TC002 - an annotation of a field that is set later

from guest.client.streams import ServeStream
from websearch.access import Caller
from websearch.jobs import Answer, JobFailed
from websearch.workers import JobOverdue, NoWorker, OpenBridge, WorkerLost, Workers

log = logging.getLogger(__name__)

PING_S = 10.0  # a machine that does not answer for so long is ill
START_S = 180.0  # an emulated machine without a snapshot imports its libraries for so long
ATTEMPTS = 2  # of a job whose worker is lost: reading a page a second time changes nothing


class WebMachine(Protocol):
    """A machine with the workers of the template websearch-tools."""

    async def ping(self) -> None:
        """Return if the machine is well; raise any error if not."""
        ...

    async def memory_bytes(self) -> int:
        """Return the memory that it takes from its host."""
        ...


class MachineSource(Protocol):
    """Starts such machines."""

    def machine(self, serve_stream: ServeStream) -> AbstractAsyncContextManager[WebMachine]:
        """Start a machine whose streams go to `serve_stream`. It ends with the context."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """When a machine is replaced or stopped."""

    idle_s: float = 300.0
    max_requests: int = 500
    max_age_s: float = 3600.0
    max_memory_bytes: int = 1536 * 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024
    max_overdue: int = 5  # jobs in a row without any answer
    check_s: float = 5.0  # between two looks at a machine
    retry_s: float = 60.0  # after a machine that could not be replaced


@dataclass(frozen=True, slots=True)
class Condition:
    """What is known about a machine."""

    requests: int
    active: int  # jobs in it now
    age_s: float
    unused_s: float  # since its last job ended
    memory_bytes: int
    well: bool
    overdue: int = 0  # jobs in a row without any answer


def decide(condition: Condition, limits: Limits) -> Literal["keep", "replace", "stop"]:
    """Say what to do with the machine that serves: a pure function."""
    if not condition.well:
        return "stop"  # the next request starts another
    if not condition.active and condition.unused_s >= limits.idle_s:
        return "stop"
    if (
        condition.requests >= limits.max_requests
        or condition.age_s >= limits.max_age_s
        or condition.memory_bytes >= limits.max_memory_bytes
        or condition.overdue >= limits.max_overdue
    ):
        return "replace"
    return "keep"


@dataclass(eq=False)
class _Station:
    """A machine from its start to its end."""

    workers: Workers
    machine: WebMachine | None = None
    failure: Exception | None = None
    ready: anyio.Event = field(default_factory=anyio.Event)  # it serves, or has failed to start
    gone: anyio.Event = field(default_factory=anyio.Event)
    changed: anyio.Event = field(default_factory=anyio.Event)  # a job has ended
    retired: bool = False  # it gets no new jobs
    requests: int = 0
    active: int = 0
    overdue: int = 0
    started: float = 0.0
    used: float = 0.0
    replace_at: float = 0.0  # not before
    successor: "_Station | None" = None  # which starts, or serves already

    def begin(self) -> None:
        """Count a new job."""
        self.requests += 1
        self.active += 1

    def end(self) -> None:
        """Count a job that has ended."""
        self.active -= 1
        self.used = anyio.current_time()
        self.changed.set()
        self.changed = anyio.Event()


class Singleton(AsyncContextManagerMixin):
    """Runs jobs; see websearch.jobs.Jobs."""

    def __init__(self, source: MachineSource, open_bridge: OpenBridge, limits: Limits | None = None) -> None:
        self._source = source
        self._open_bridge = open_bridge
        self._limits = limits or Limits()
        self._current: _Station | None = None
        self._tasks: TaskGroup

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with anyio.create_task_group() as self._tasks:
            yield self
            self._tasks.cancel_scope.cancel()

    async def run(self, kind: str, fields: Mapping[str, Any], *, caller: Caller, timeout_s: float) -> Answer:
        """Run one job in a process of its own.

        Raises:
            JobFailed: there is no answer.
        """
        lost = WorkerLost()
        for _ in range(ATTEMPTS):
            station = await self._serving()
            station.begin()
            try:
                return await self._run_on(station, kind, fields, caller, timeout_s)
            except WorkerLost as error:
                lost = error
                await self._suspect(station)
                if isinstance(error, NoWorker) and not station.retired:
                    break  # the machine is only busy: a second wait would be as long
            finally:
                station.end()
        raise JobFailed("worker", str(lost)) from lost

    async def _run_on(
        self, station: _Station, kind: str, fields: Mapping[str, Any], caller: Caller, timeout_s: float
    ) -> Answer:
        """Run a job, unless the machine ends meanwhile. Raises WorkerLost."""
        answers: list[Answer] = []
        failures: list[JobFailed | WorkerLost] = []
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await station.gone.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                answers.append(await station.workers.run(kind, fields, caller=caller, timeout_s=timeout_s))
                station.overdue = 0
            except (JobFailed, WorkerLost) as error:
                station.overdue = station.overdue + 1 if isinstance(error, JobOverdue) else 0
                failures.append(error)
            tasks.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if not answers:
            raise WorkerLost
        return answers[0]

    # ---------------------------------------------------------------- machines

    async def _serving(self) -> _Station:
        """Return the machine that takes new jobs, started if there is none. Raises JobFailed."""
        station = self._current
        if station is None:
            station = self._current = self._start()
        await station.ready.wait()
        if station.failure is not None:
            raise JobFailed("unavailable", _reason(station.failure)) from station.failure
        return station

    def _start(self) -> _Station:
        station = _Station(Workers(self._open_bridge, max_body=self._limits.max_answer_bytes))
        self._tasks.start_soon(self._keep, station)
        return station

    async def _keep(self, station: _Station) -> None:
        """Hold a machine until it is not needed any more."""
        try:
            with anyio.fail_after(START_S) as starting:
                async with self._source.machine(station.workers.serve) as machine:
                    starting.deadline = float("inf")
                    station.machine = machine
                    station.started = station.used = anyio.current_time()
                    station.ready.set()
                    await self._watch(station, machine)
                    await self._drain(station)
        except Exception as error:
            if station.machine is None:
                station.failure = error
            log.warning("the machine that reaches the web has ended: %s", _reason(error))
        finally:
            self._leave(station)
            station.gone.set()
            station.ready.set()

    async def _watch(self, station: _Station, machine: WebMachine) -> None:
        """Return when a machine shall get no more jobs."""
        while not station.retired:
            condition = await self._condition(station, machine)
            what = decide(condition, self._limits)
            if what == "stop":
                self._leave(station)
                if not condition.well:
                    log.warning("the machine that reaches the web does not answer: the next request gets another")
                return
            if what == "replace" and self._current is station and anyio.current_time() >= station.replace_at:
                await self._replace(station)
                continue
            with anyio.move_on_after(min(self._limits.check_s, self._limits.idle_s)):
                await station.gone.wait()

    async def _replace(self, old: _Station) -> None:
        """Start the next machine, and let it serve once it is ready. If it does not start, the old one goes on."""
        new = old.successor = self._start()
        await new.ready.wait()
        if new.failure is None:
            self._leave(old)
        else:
            old.successor = None
            old.replace_at = anyio.current_time() + self._limits.retry_s

    async def _drain(self, station: _Station) -> None:
        """Let the jobs of a machine finish; each has its own time limit."""
        while station.active:
            await station.changed.wait()

    async def _condition(self, station: _Station, machine: WebMachine) -> Condition:
        memory, well = 0, True
        try:
            with anyio.fail_after(PING_S):
                await machine.ping()
                memory = await machine.memory_bytes()
        except Exception as error:  # whatever the reason is, it is not well
            log.info("the machine that reaches the web is not well: %s", error)
            well = False
        if station.workers.stuck:
            log.info("the machine that reaches the web has no workers any more")
            well = False
        now = anyio.current_time()
        return Condition(
            requests=station.requests,
            active=station.active,
            age_s=now - station.started,
            unused_s=now - station.used,
            memory_bytes=memory,
            well=well,
            overdue=station.overdue,
        )

    async def _suspect(self, station: _Station) -> None:
        """Give a machine that lost a worker no more jobs if it is ill, or if it has no other job that kept it busy."""
        if station.machine is not None:
            condition = await self._condition(station, station.machine)
            if not condition.well or condition.active <= 1:
                self._leave(station)

    def _leave(self, station: _Station) -> None:
        station.retired = True
        if self._current is station:
            following = station.successor
            self._current = None if following is None or following.retired else following


def _reason(error: Exception) -> str:
    """Return why a machine ended or did not start; some errors have no text."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"its machine did not start within {START_S:g} s"
    return str(error) or type(error).__name__
