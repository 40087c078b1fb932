"""Holds a sandbox's machine: the sandbox says whether it wants one, and its keeper gets it."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import anyio.abc

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.machines.provider import Frozen, Lease

MachineSource = AbstractAsyncContextManager[Lease]


class Acquisition:
    """One attempt to get a machine: when the sandbox is created, and whenever it is resumed."""

    def __init__(self, source: MachineSource) -> None:
        self.source = source
        self.asked_at = anyio.current_time()
        self.scope = anyio.CancelScope()
        self.settled = anyio.Event()  # the machine is here, or there will be none
        self.ended = anyio.Event()  # nothing is left of the machine
        self.failure: SandboxError | None = None

    def give_up(self) -> None:
        """Stop waiting for the machine. One that is already here stays."""
        if not self.settled.is_set():
            self.scope.cancel()


class MachineSlot:
    """Holds a machine, its frozen state, or neither yet."""

    def __init__(self, source: MachineSource) -> None:
        self.lease: Lease | None = None
        self.last_lease: Lease | None = None  # also set while there is only a frozen state
        self.frozen: Frozen | None = None
        self.tasks: anyio.abc.TaskGroup | None = None  # of what runs in the machine; the keeper opens and closes it
        self.changed = anyio.Event()  # the keeper has to look at the sandbox again
        self._newest = Acquisition(source)
        self._wanted: Acquisition | None = self._newest
        self._saved = AsyncExitStack()  # removes the frozen state
        self.first_settled = self._newest.settled  # the first machine is here, or there will be none

    # -- what the sandbox wants ----------------------------------------------------------------------------

    def give_up(self) -> None:
        """Stop waiting for a machine. The keeper lets go of one that is here when it sees that the sandbox is over."""
        self._newest.give_up()
        self.changed.set()

    def start_task(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Start a task that ends before the machine does."""
        assert self.tasks is not None, "a usable sandbox has a machine"
        self.tasks.start_soon(work, name=name)

    def swap_out(self, frozen: Frozen, saved: AsyncExitStack) -> anyio.Event:
        """Replace the machine with its frozen state, which `saved` removes. Return the event of the machine's end."""
        self.frozen, self.lease, self._saved = frozen, None, saved
        self.changed.set()
        return self._newest.ended

    async def swap_in(self, source: MachineSource) -> SandboxError | None:
        """Replace the frozen state with a machine. Return the error if there is none and the state is still good."""
        acquisition = self._newest = self._wanted = Acquisition(source)
        self.changed.set()
        try:
            await acquisition.settled.wait()
        except BaseException:
            acquisition.give_up()
            raise
        return acquisition.failure

    # -- what the keeper does ------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether the sandbox wants a machine that the keeper has not tried to get yet."""
        return self._wanted is not None

    def take_wanted(self) -> Acquisition | None:
        """Return the acquisition to try now, once."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def fill(self, lease: Lease) -> None:
        """Put a machine in. The frozen state stays on disk until `remove_saved`."""
        self.lease = self.last_lease = lease
        self.frozen = None

    async def remove_saved(self) -> None:
        """Remove the frozen state, if there is one."""
        await self._saved.aclose()

    def clear(self) -> None:
        """Forget the machine and the frozen state: both are gone."""
        self.lease = self.last_lease = self.frozen = None
        self._newest.settled.set()
