"""One sandbox: who owns it, which state it is in, and the task that keeps its machine."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import anyio

from guest.errors import AgentGone, AgentTimeout, ProtocolError
from mcp_sandbox import logs
from mcp_sandbox.errors import Closed, Expired, MachineLost, SandboxError, first_of
from mcp_sandbox.provider import Lease, Provider
from vmm.driver import Machine

LOSS_REASON_S = 1.0  # the agent's stream breaks a moment before the machine's process is known to have ended

logger = logging.getLogger(__name__)


class State(StrEnum):
    """Where a sandbox is in its life."""

    STARTING = "starting"
    READY = "ready"
    CLOSED = "closed"  # by its owner, or because the server ends
    EXPIRED = "expired"
    LOST = "lost"  # the machine ended by itself
    FAILED = "failed"  # it never started


FINAL = frozenset({State.CLOSED, State.EXPIRED, State.LOST, State.FAILED})
MOVES = {
    State.STARTING: frozenset({State.READY, State.CLOSED, State.FAILED}),
    State.READY: frozenset({State.CLOSED, State.EXPIRED, State.LOST}),
}


@dataclass(frozen=True, slots=True)
class Lifespan:
    """How long a sandbox may live."""

    idle_s: float
    max_s: float


class Sandbox:
    """A machine in an owner's hands, from the first request to the last trace of it."""

    def __init__(self, sandbox_id: str, owner: str, template: str, lifespan: Lifespan) -> None:
        self.id = sandbox_id
        self.owner = owner
        self.template = template
        self.lifespan = lifespan
        self.state = State.STARTING
        self.created = self.last_used = anyio.current_time()
        self.lease: Lease | None = None
        self.run_lock = anyio.Lock()  # one kernel, one run at a time
        self.state_lost = False  # a run that nobody got the result of had to be killed
        self.settled = anyio.Event()  # it is ready, or never will be
        self.ended = anyio.Event()  # nothing of it is left
        self._reason = ""
        self._failure: SandboxError | None = None
        self._over = anyio.Event()
        self._start_scope = anyio.CancelScope()
        self._uses: set[anyio.CancelScope] = set()

    # -- state ---------------------------------------------------------------------------------------------

    def end(self, state: State, reason: str = "") -> None:
        """Move to a final state and let go of the machine. Only the first call counts."""
        if self.state in FINAL:
            return
        if self.state is State.STARTING:
            self._start_scope.cancel()
        self._move(state)
        self._reason = reason
        self._over.set()
        for use in self._uses:
            use.cancel()

    def error(self) -> SandboxError:
        """What to tell somebody who wants to use a sandbox that is over."""
        match self.state:
            case State.FAILED if self._failure is not None:
                return self._failure
            case State.EXPIRED:
                return Expired(self.id, self._reason)
            case State.LOST:
                return MachineLost(self.id, self._reason)
            case _:
                return Closed(self.id)

    def _move(self, state: State) -> None:
        if state not in MOVES.get(self.state, frozenset()):
            raise AssertionError(f"a sandbox cannot go from {self.state} to {state}")
        self.state = state

    # -- use -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Lease]:
        """The machine, for as long as the sandbox lives: when it ends, what is done with it is cancelled.

        Raises:
            SandboxError: the sandbox is over, or ended in the middle.
        """
        await self.settled.wait()
        if self.state in FINAL or self.lease is None:
            raise self.error()
        with anyio.CancelScope() as scope:
            self._uses.add(scope)
            try:
                yield self.lease
            except (AgentGone, AgentTimeout, ProtocolError) as error:
                with anyio.move_on_after(LOSS_REASON_S):
                    await self._over.wait()
                self.end(State.LOST, str(error))
                raise self.error() from error
            finally:
                self._uses.discard(scope)
                self.last_used = anyio.current_time()
        if scope.cancelled_caught:
            raise self.error()

    def expires_at(self) -> tuple[float, str]:
        """When the sandbox ends if nothing more happens, and why. A sandbox in use is not idle."""
        idle_since = anyio.current_time() if self._uses else self.last_used
        return min(
            (self.created + self.lifespan.max_s, f"it was {self.lifespan.max_s:g} s old"),
            (idle_since + self.lifespan.idle_s, f"it was idle for {self.lifespan.idle_s:g} s"),
        )

    # -- the keeper ----------------------------------------------------------------------------------------

    async def keep(self, provider: Provider) -> None:
        """Get a machine and hold it until the sandbox is over. Runs in a task of its own and never raises."""
        try:
            with logs.about(self.id), self._start_scope:
                async with provider.acquire(self.template) as lease:
                    self._settle(lease)
                    await self._hold(lease)
        except Exception as error:
            self._fail(error)
        finally:
            self.end(State.CLOSED, "the server stopped")
            self.lease = None
            self.settled.set()
            self.ended.set()

    def _settle(self, lease: Lease) -> None:
        self.lease = lease
        self._move(State.READY)
        self.last_used = anyio.current_time()
        self.settled.set()

    async def _hold(self, lease: Lease) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, lease.machine)
            while not self._over.is_set():
                deadline, why = self.expires_at()
                if deadline <= anyio.current_time():
                    self.end(State.EXPIRED, why)
                with anyio.CancelScope(deadline=deadline):
                    await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _watch(self, machine: Machine) -> None:
        self.end(State.LOST, f"the machine ended with {await machine.wait()}")

    def _fail(self, error: Exception) -> None:
        first = first_of(error)
        if first is not error or not isinstance(first, SandboxError):
            logger.warning("sandbox %s ended with an error", self.id, exc_info=error, extra={"sandbox": self.id})
        if self.state is State.STARTING:
            if not isinstance(first, SandboxError):
                first = SandboxError(
                    f"The sandbox could not be started ({first}). Try again; `mcp-sandbox doctor` tells more."
                )
            self._failure = first
            self.end(State.FAILED)
        elif self.state is State.READY:
            self.end(State.LOST, str(first))
