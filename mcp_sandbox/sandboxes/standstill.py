"""Lets a machine stand still while nothing runs in it: an idle gVisor takes 3 % of a CPU otherwise."""

import asyncio
import logging
from collections.abc import Callable

from guest.errors import GuestError
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.machines.provider import Lease, LeasedMachine
from vmm.errors import VmmError

logger = logging.getLogger(__name__)


class Standstill:
    """Whether a sandbox's machine stands still, and when that is tried next. The next use lets it continue."""

    def __init__(self, after_s: float) -> None:
        """It is attempted once the machine was not used for `after_s` seconds; 0: never."""
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None
        self._stands_still = False

    def expect(self, attempt: Callable[[], None]) -> None:
        """Call `attempt` later, unless the machine is used before."""
        self.cancel()
        if self._after_s:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, attempt)

    def cancel(self) -> None:
        """Attempt it no more: the machine is used, or has ended."""
        if self._timer is not None:
            self._timer.cancel()

    async def begin(self, lease: Lease) -> bool:
        """Let the machine stand still if its agent says that nothing runs in it; return whether it does."""
        try:
            if await lease.agent.at_rest():
                self._stands_still = True  # before the machine does: a cancelled pause may have stopped it
                await lease.machine.pause()
                return True
        except (GuestError, VmmError, SandboxError) as error:  # the next use finds out what that means
            logger.info("machine %s does not stand still: %s", lease.machine.id, error)
        return False

    async def end(self, machine: LeasedMachine) -> None:
        """Let the machine continue, if it stands still. Takes less than a millisecond."""
        if self._stands_still:
            self._stands_still = False
            await machine.resume()
