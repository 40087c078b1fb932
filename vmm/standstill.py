"""Stop and continue all processes of a machine one by one, on hosts without a cgroup freezer."""

import os
import signal
from contextlib import suppress

import anyio

from vmm.errors import MachineLost
from vmm.process_table import thread_states, with_descendants

PAUSE_S = 5.0  # it takes milliseconds, unless the machine's processes keep continuing each other
LOOK_AGAIN_S = 0.001
RUNNING = frozenset("RS")  # not D: such a thread stops before it runs again, and a vfork may keep it waiting


async def stop(pid: int) -> list[int]:
    """Stop all below `pid`, or it alone if it has no children; return what was not stopped before. Raise MachineLost.

    A stopped process starts no others, and the next pass sees one that was just being started. So when a pass finds
    nothing that runs, nothing will.
    """
    stopped: list[int] = []
    with anyio.move_on_after(PAUSE_S):
        while True:
            running = [found for found in with_descendants(pid)[1:] or [pid] if thread_states(found) & RUNNING]
            if not running:
                return stopped
            for found in running:
                with suppress(ProcessLookupError):
                    os.kill(found, signal.SIGSTOP)
            stopped += [found for found in running if found not in stopped]
            await anyio.sleep(LOOK_AGAIN_S)
    resume(stopped)
    raise MachineLost(f"the machine did not stop in {PAUSE_S:.0f} s")


def resume(stopped: list[int]) -> None:
    """Continue stopped processes."""
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
