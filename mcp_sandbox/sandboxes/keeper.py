"""The task that keeps a sandbox's machine, or its frozen state, for as long as the sandbox lives."""

import logging
from collections.abc import Callable

import anyio

from mcp_sandbox import logs
from mcp_sandbox.errors import HostLost, SandboxError, StartFailed, StateLost, first_of
from mcp_sandbox.machines.provider import Lease, LeasedMachine
from mcp_sandbox.sandboxes.lifecycle import OVER, USABLE, End, State
from mcp_sandbox.sandboxes.sandbox import Attempt, Sandbox

logger = logging.getLogger(__name__)


class KeptSandbox(Sandbox):
    """A sandbox with what its keeper does."""

    async def keep(self) -> None:
        """Hold a machine, or its frozen state, until the sandbox is over. Runs in a task of its own, never raises."""
        try:
            with logs.about(self.id):
                while attempt := await self._next_attempt():
                    await self._have_machine(attempt)
        except Exception as error:
            self._fail(error)
        finally:
            self.end(End.CLOSED, "the server stopped")
            with anyio.CancelScope(shield=True):
                await self._freezer.aclose()
            if self.state is State.CLOSING:
                self._move(State.CLOSED)
            self.lease = self.last_lease = self.frozen = None
            self._attempt.settled.set()
            self.ended.set()

    async def _next_attempt(self) -> Attempt | None:
        """What to get a machine from, as soon as one is wanted; None if the sandbox is over."""
        await self._until(lambda: self._wanted is not None or self.state in OVER)
        attempt, self._wanted = self._wanted, None
        return None if self.state in OVER else attempt

    async def _have_machine(self, attempt: Attempt) -> None:
        """Get a machine and hold it until it is let go."""
        try:
            with attempt.scope:
                async with attempt.source as lease, anyio.create_task_group() as self._tasks:
                    if not attempt.scope.cancel_called:  # else it came at the very moment nobody wanted it any more
                        self._tasks.start_soon(self._watch, lease.machine)
                        self._settle(lease, attempt)
                        await self._freezer.aclose()
                        await self._until(lambda: self.state not in USABLE)
                    self._tasks.cancel_scope.cancel()
        except Exception as error:
            if self.state is not State.PAUSED:
                raise
            self._stay_paused(attempt, error)
        finally:
            self._tasks = None
            attempt.settled.set()
            attempt.ended.set()

    def _settle(self, lease: Lease, attempt: Attempt) -> None:
        self.lease = self.last_lease = lease
        self.frozen = None
        with self._watched():
            self._watcher.got_machine(self, lease.machine, anyio.current_time() - attempt.asked_at)
        self._move(State.READY)
        self.last_used = anyio.current_time()
        attempt.settled.set()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait for a change, and see to it that the sandbox ends when its time is up."""
        while not done():
            self._changed = anyio.Event()
            deadline, why = self.ends_at()
            if deadline <= anyio.current_time():
                self.end(End.EXPIRED, why)
                continue
            with anyio.CancelScope(deadline=deadline):
                await self._changed.wait()

    async def _watch(self, machine: LeasedMachine) -> None:
        try:
            reason = f"the machine ended with {await machine.wait()}"
        except HostLost as error:
            reason = _host_lost(error)
        self.end(End.LOST, reason)

    def _stay_paused(self, attempt: Attempt, error: Exception) -> None:
        """There is no machine for a resume; or the one that was let go has not ended well, which matters to nobody."""
        attempt.failure = self._told(error)
        match attempt.failure:
            case StateLost() as lost:
                self.end(End.LOST, str(lost))
            case HostLost() as lost if self.frozen is not None and lost.host == self.frozen.host.name:
                self.end(End.LOST, _host_lost(lost))
            case _:
                return
        attempt.failure = None

    def _fail(self, error: Exception) -> None:
        told = self._told(error)
        if self.state is State.CREATING:
            self._failure = told
            self.end(End.FAILED)
        else:
            self.end(End.LOST, str(first_of(error)))

    def _told(self, error: Exception) -> SandboxError:
        """The error in words for the owner. One that is not ours is a fault of this program: the log has all of it."""
        first = first_of(error)
        if first is not error or not isinstance(first, SandboxError):
            logger.warning("sandbox %s ended with an error", self.id, exc_info=error, extra={"sandbox": self.id})
        if isinstance(first, SandboxError):
            return first
        return StartFailed(str(first))


def _host_lost(error: HostLost) -> str:
    return f"its host {error.host} was lost: {error.reason}"
