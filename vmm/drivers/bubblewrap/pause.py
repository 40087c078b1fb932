"""Stops all processes of a machine that is a tree of processes, and lets them go on."""

import os
import signal
from contextlib import suppress

import anyio

from vmm.errors import MachineLost
from vmm.process_table import thread_states, with_descendants

PAUSE_S = 5.0  # it takes milliseconds, unless processes of the machine keep waking each other
LOOK_AGAIN_S = 0.001
RUNNING = frozenset("RS")  # D too is quiet: it stops before it does anything else, and a vfork may keep it waiting


async def stop(pid: int) -> list[int]:
    """Stop everything that `pid` has started; returns what was not stopped before. Raises MachineLost.

    A stopped process starts no others, and one that was just being started is seen the next time we look: when a
    look finds nothing that runs, nothing will.
    """
    stopped: list[int] = []
    with anyio.move_on_after(PAUSE_S):
        while True:
            everyone = with_descendants(pid)[1:]
            running = [one for one in everyone if thread_states(one) & RUNNING]
            if not running:
                return stopped
            for one in running:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGSTOP)
            stopped += [one for one in running if one not in stopped]
            await anyio.sleep(LOOK_AGAIN_S)
    resume(stopped)
    raise MachineLost(f"the machine did not stop in {PAUSE_S:.0f} s")


def resume(stopped: list[int]) -> None:
    """Let processes go on that were stopped."""
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
