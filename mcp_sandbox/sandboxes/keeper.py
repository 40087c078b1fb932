"""The task that holds a sandbox's machine, or its frozen state, for as long as the sandbox lives."""

import logging
from collections.abc import Callable

import anyio

from guest.errors import first_error
from mcp_sandbox import logs
from mcp_sandbox.errors import HostLost, SandboxError, StartFailed, StateLost
from mcp_sandbox.machines.provider import Lease, LeasedMachine
from mcp_sandbox.sandboxes.lifecycle import OVER, USABLE, End, State
from mcp_sandbox.sandboxes.machine_slot import Acquisition
from mcp_sandbox.sandboxes.sandbox import Sandbox

logger = logging.getLogger(__name__)


class Keeper:
    """Fills and empties the machine slot of one sandbox, as the sandbox wants it."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._slot = box.slot

    async def keep(self) -> None:
        """Hold a machine, or its frozen state, until the sandbox is over. Raises nothing but cancellation."""
        try:
            with logs.about(self._box.id):
                while acquisition := await self._next_acquisition():
                    await self._hold_machine(acquisition)
        except Exception as error:
            self._fail(error)
        finally:
            self._box.end(End.CLOSED, "the server stopped")
            with anyio.CancelScope(shield=True):
                await self._slot.remove_saved()
            self._slot.clear()
            self._box.torn_down()

    async def _next_acquisition(self) -> Acquisition | None:
        """Wait until a machine is wanted; None: the sandbox is over."""
        await self._until(lambda: self._slot.is_wanted or self._box.state in OVER)
        acquisition = self._slot.take_wanted()
        return None if self._box.state in OVER else acquisition

    async def _hold_machine(self, acquisition: Acquisition) -> None:
        """Get a machine and hold it until the sandbox is paused or over."""
        slot = self._slot
        try:
            with acquisition.scope:
                async with acquisition.source as lease, anyio.create_task_group() as slot.tasks:
                    if not acquisition.scope.cancel_called:  # else it was given up in the same moment
                        slot.tasks.start_soon(self._watch, lease.machine)
                        self._settle(lease, acquisition)
                        await slot.remove_saved()
                        await self._until(lambda: self._box.state not in USABLE)
                    slot.tasks.cancel_scope.cancel()
        except Exception as error:
            if self._box.state is not State.PAUSED:
                raise
            self._stay_paused(acquisition, error)
        finally:
            slot.tasks = None
            acquisition.settled.set()
            acquisition.ended.set()

    def _settle(self, lease: Lease, acquisition: Acquisition) -> None:
        self._slot.fill(lease)
        self._box.machine_ready(lease.machine, anyio.current_time() - acquisition.asked_at)
        acquisition.settled.set()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, and end the sandbox when its time is up."""
        while not done():
            changed = self._slot.changed = anyio.Event()
            deadline, why = self._box.ends_at()
            if deadline <= anyio.current_time():
                self._box.end(End.EXPIRED, why)
                continue
            with anyio.CancelScope(deadline=deadline):
                await changed.wait()

    async def _watch(self, machine: LeasedMachine) -> None:
        try:
            reason = f"the machine ended with {await machine.wait()}"
        except HostLost as error:
            reason = _host_lost(error)
        self._box.end(End.LOST, reason)

    def _stay_paused(self, acquisition: Acquisition, error: Exception) -> None:
        """Keep the frozen state: a resume got no machine, or the machine of a pause did not end cleanly."""
        frozen = self._slot.frozen
        match self._owner_error(error):
            case StateLost() as lost:
                self._box.end(End.LOST, str(lost))
            case HostLost() as lost if frozen is not None and lost.host == frozen.host.name:
                self._box.end(End.LOST, _host_lost(lost))
            case failure:
                acquisition.failure = failure

    def _fail(self, error: Exception) -> None:
        failure = self._owner_error(error)
        if self._box.state is State.CREATING:
            self._box.start_failed(failure)
        else:
            self._box.end(End.LOST, str(first_error(error)))

    def _owner_error(self, error: Exception) -> SandboxError:
        """Return the error that the owner gets. An unexpected one is a bug: it is logged with its traceback."""
        first = first_error(error)
        if first is not error or not isinstance(first, SandboxError):
            box_id = self._box.id
            logger.warning("sandbox %s ended with an error", box_id, exc_info=error, extra={"sandbox": box_id})
        return first if isinstance(first, SandboxError) else StartFailed(str(first))


def _host_lost(error: HostLost) -> str:
    return f"its host {error.host} was lost: {error.reason}"
