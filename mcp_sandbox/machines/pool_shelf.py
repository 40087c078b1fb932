"""What a pool knows about the machines of one template. Nothing here waits."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import anyio

from mcp_sandbox.errors import PooledMachineLost, SandboxError, first_of
from mcp_sandbox.machines.pool_plan import Demand, ReadyMachine, TemplateState
from mcp_sandbox.machines.provider import Lease, LeaseTimings
from mcp_sandbox.machines.unique import MAX_CLOCK_SKEW_S
from templates.model import Template

AT_ONCE = LeaseTimings(queue_s=0.0, restore_s=0.0)  # what somebody who gets a ready machine has waited for it
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 300.0  # a template that is not built yet, say, is found within minutes of its build
STABLE_S = 60.0  # a machine that ends sooner was not well when it started: the next one might do the same

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateStats:
    """One template's part of a pool; what is not a number of machines now is counted from the start of the server."""

    ready: int
    starting: int
    hits: int
    misses: int
    started: int
    stopped: int  # nobody had them
    failed: int  # did not start, or ended while they waited
    last_error: str | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment."""

    templates: Mapping[str, TemplateStats]


class PooledMachine:
    """A machine that waits, and the two events of its end."""

    def __init__(self, number: int, lease: Lease, now: float, wall: float) -> None:
        self.id = number
        self.lease = replace(lease, timings=AT_ONCE)
        self.since = now
        self.lost = False
        self.discarded = False
        self.released = anyio.Event()  # nobody wants it any more
        self.ended = anyio.Event()  # nothing of it is left
        self._wall_offset = wall - now

    def healthy(self, now: float, wall: float, version: str | None) -> bool:
        """Whether it can be given to somebody who is to get one of `version`. Asked at every hand-out: it reads a few
        fields and waits for nothing."""
        # The two clocks of the host part when it was suspended or its date was set; the guest's went its own way then.
        jumped = abs(wall - now - self._wall_offset) > MAX_CLOCK_SKEW_S
        current = self.lease.version == version
        return current and not self.lost and not jumped and self.lease.agent.failure is None


class Shelf:
    """The machines of one template and what became of them. A machine is ready, then handed out or discarded."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.name = template.name
        self.version: str | None = None  # of what is built of the template now; None: nothing is
        self.ready: list[PooledMachine] = []  # oldest first
        self.starting = 0
        self.demand = Demand()
        self.misses = 0
        self._stopping = 0
        self._failures = 0  # in a row
        self._retry_at: float | None = None
        self._last_error: str | None = None
        self._hits = self._started = self._stopped = self._failed = 0

    def state(self, now: float, wall: float) -> TemplateState:
        """What the plan has to know."""
        ready = tuple(ReadyMachine(m.id, m.since, m.healthy(now, wall, self.version)) for m in self.ready)
        return TemplateState(
            self.name,
            self.template.machine.memory_mb,
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
            hits=self._hits,
            misses=self.misses,
            started=self._started,
            stopped=self._stopped,
            failed=self._failed,
            last_error=self._last_error,
        )

    # -- a machine's way -----------------------------------------------------------------------------------

    def put(self, machine: PooledMachine) -> None:
        """A machine has started. Failures are not forgotten for that: it might end in the next moment."""
        self.starting -= 1
        self._started += 1
        self._retry_at = None
        self.ready.append(machine)

    def hand_out(self, machine: PooledMachine) -> None:
        self.ready.remove(machine)
        self._hits += 1
        self.recover()

    def discard(self, machine: PooledMachine) -> None:
        """Let a machine end that nobody had."""
        self.ready.remove(machine)
        self._stopping += 1
        self._stopped += 1
        machine.discarded = True
        machine.released.set()

    def forget(self, machine: PooledMachine | None) -> None:
        """A machine's holder ends: it has ended, or (None) never started."""
        if machine is None:
            self.starting -= 1
            return
        self._stopping -= machine.discarded
        if machine in self.ready:
            self.ready.remove(machine)
        machine.ended.set()

    # -- failures ------------------------------------------------------------------------------------------

    def lose(self, machine: PooledMachine, why: str, now: float) -> None:
        """A machine ended by itself. If it was in somebody's hands, that one will notice."""
        if machine.lost or machine not in self.ready:
            return
        machine.lost = True
        if machine.since + STABLE_S <= now:
            self._failures = 0
        self.fail(PooledMachineLost(why), now)

    def fail(self, error: Exception, now: float) -> None:
        """Remember why there is a machine less, and wait longer each time before the next one is started."""
        first = first_of(error)
        if str(first) != self._last_error:
            unknown = None if isinstance(first, SandboxError) else error
            logger.warning("no machine of %s could be kept ready: %s", self.name, first, exc_info=unknown)
        self._last_error = str(first)
        self._failed += 1
        if self._retry_at is None or self._retry_at <= now:  # of several that fail at once, one counts
            self._retry_at = now + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 32))
            self._failures += 1

    def recover(self) -> None:
        """Machines of this template work: somebody has one."""
        self._failures = 0
        self._retry_at = None
