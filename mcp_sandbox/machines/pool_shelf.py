"""The pooled machines of one template, and the bookkeeping around them. Nothing here waits."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import anyio

from guest.errors import first_error
from mcp_sandbox.errors import PooledMachineLost, SandboxError
from mcp_sandbox.machines.pool_plan import Demand, ReadyMachine, TemplateState
from mcp_sandbox.machines.provider import Lease, LeaseTimings
from mcp_sandbox.machines.unique import MAX_CLOCK_SKEW_S
from templates.model import Template

AT_ONCE = LeaseTimings(queue_s=0.0, restore_s=0.0)
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 300.0
STABLE_S = 60.0  # a machine that ends sooner was bad from its start, and the next one may be too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateStats:
    """One template's part of a pool."""

    ready: int
    starting: int
    # Since the server started:
    hits: int
    misses: int
    started: int
    stopped: int  # without having been leased
    failed: int  # did not start, or ended in the pool
    last_error: str | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment."""

    templates: Mapping[str, TemplateStats]


class PooledMachine:
    """A machine in the pool, or leased from it."""

    def __init__(self, number: int, lease: Lease, now: float, wall: float) -> None:
        self.id = number
        self.lease = replace(lease, timings=AT_ONCE)
        self.since = now
        self.lost = False
        self.discarded = False
        self.released = anyio.Event()  # it is no longer needed
        self.ended = anyio.Event()  # it has been torn down
        self._wall_offset = wall - now

    def healthy(self, now: float, wall: float, version: str | None) -> bool:
        """Whether it may be leased to a request for `version`. Part of every lease, so it only reads a few fields."""
        # The host's clocks diverge when it was suspended or its date was set; the guest's clock is wrong then.
        jumped = abs(wall - now - self._wall_offset) > MAX_CLOCK_SKEW_S
        current = self.lease.version == version
        return current and not self.lost and not jumped and self.lease.agent.failure is None


class Shelf:
    """The pooled machines of one template. A machine is ready, and then leased or discarded."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.name = template.name
        self.version: str | None = None  # of the template's current build; None: it has none
        self.ready: list[PooledMachine] = []  # oldest first
        self.starting = 0
        self._awaited = False  # a request waits for the first one
        self.start_ended = anyio.Event()  # one of them has started or failed
        self.demand = Demand()
        self.hits = self.misses = 0  # requests that found a machine ready, and others
        self._stopping = 0
        self._failures = 0  # in a row
        self._retry_at: float | None = None
        self._last_error: str | None = None
        self._started = self._stopped = self._failed = 0

    def state(self, now: float, wall: float) -> TemplateState:
        """Return what the plan needs to know."""
        ready = tuple(ReadyMachine(m.id, m.since, m.healthy(now, wall, self.version)) for m in self.ready)
        return TemplateState(
            self.name,
            self.template.machine.host_mb,
            self.template.pool if self.version is not None else "cold",
            ready,
            self.starting,
            self._stopping,
            self.demand,
            self._retry_at,
        )

    def stats(self) -> TemplateStats:
        return TemplateStats(
            ready=sum(not machine.lost for machine in self.ready),
            starting=self.starting,
            hits=self.hits,
            misses=self.misses,
            started=self._started,
            stopped=self._stopped,
            failed=self._failed,
            last_error=self._last_error,
        )

    # -- machines ------------------------------------------------------------------------------------------

    def put(self, machine: PooledMachine) -> None:
        """Add a machine that has started. Earlier failures still count: it may end in the next moment."""
        self._started += 1
        self._retry_at = None
        self.ready.append(machine)
        self._end_start()

    def lease(self, machine: PooledMachine) -> None:
        """Take a machine for a request."""
        self.ready.remove(machine)
        self.recover()

    def discard(self, machine: PooledMachine) -> None:
        """Stop a machine that was not leased."""
        self.ready.remove(machine)
        self._stopping += 1
        self._stopped += 1
        machine.discarded = True
        machine.released.set()

    def remove(self, machine: PooledMachine | None) -> None:
        """Remove a machine that has ended, or (None) that never started."""
        if machine is None:
            self._end_start()
            return
        self._stopping -= machine.discarded
        if machine in self.ready:
            self.ready.remove(machine)
        machine.ended.set()

    def begin_start(self) -> bool:
        """Count a machine that starts, and return whether it rehearses: a request may be waiting for the first one."""
        first = self._started == self.starting == 0
        self.starting += 1
        return not first

    @property
    def first_is_free(self) -> bool:
        """Whether the first machine is starting, and no request waits for it yet."""
        return self._started == 0 and self.starting > 0 and not self._awaited

    @contextmanager
    def awaiting_first(self) -> Iterator[None]:
        """Wait for the first machine, as the only request that does."""
        self._awaited = True
        try:
            yield
        finally:
            self._awaited = False

    def _end_start(self) -> None:
        self.starting -= 1
        self.start_ended.set()
        self.start_ended = anyio.Event()

    # -- failures ------------------------------------------------------------------------------------------

    def lose(self, machine: PooledMachine, why: str, now: float) -> None:
        """Count a machine that ended by itself in the pool. The caller of a leased one notices by itself."""
        if machine.lost or machine not in self.ready:
            return
        machine.lost = True
        if machine.since + STABLE_S <= now:
            self._failures = 0
        self.fail(PooledMachineLost(why), now)

    def fail(self, error: Exception, now: float) -> None:
        """Count a failure, and wait longer each time before the next start."""
        first = first_error(error)
        if str(first) != self._last_error:
            unknown = None if isinstance(first, SandboxError) else error
            logger.warning("cannot keep machines of template %s ready: %s", self.name, first, exc_info=unknown)
        self._last_error = str(first)
        self._failed += 1
        if self._retry_at is None or self._retry_at <= now:  # of several failures at once, one counts
            self._retry_at = now + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 32))
            self._failures += 1

    def start_later(self, at: float) -> None:
        """Start no machine before `at`, unless a request works earlier."""
        self._retry_at = at

    def recover(self) -> None:
        """Forget earlier failures: a machine of this template works."""
        self._failures = 0
        self._retry_at = None
