"""How long tests wait.

Something that has to happen gets `HANG_S`, which only a hang exceeds. Times that the product promises
hold on a host with a core for each process; on a busy one they are stretched by its slowdown.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import anyio

HANG_S = 150.0  # below pytest's own limit, which cannot tell what a test was waiting for; a retry waits as long again
BUILD_S = 600.0  # a template from nothing fetches Debian; most often its parts are there
PROMISED_S = 5.0  # after this time nothing is left of a machine, however it ended
LOOK_AGAIN_S = 0.02  # how often to check what has no event, such as the process table

Found = TypeVar("Found")


def slowdown() -> float:
    """How much slower this host is than an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def promised(seconds: float = PROMISED_S) -> float:
    """Return a promised time, stretched by how much slower this host is now."""
    return seconds * slowdown()


async def assert_soon_empty(look: Callable[[], Found], within_s: float) -> None:
    """Wait until `look` finds nothing any more."""
    found = look()
    with anyio.move_on_after(within_s):
        while found:
            await anyio.sleep(LOOK_AGAIN_S)
            found = look()
    assert not found, "still there"
