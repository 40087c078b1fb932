"""How long tests wait.

Something that has to happen gets `HANG_S`, which only a hang exceeds. A promise of the product about time is kept on a
host that has a core for each process; on a busy one it is stretched by as much as the host is slower.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import anyio

HANG_S = 300.0  # below pytest's own limit, which cannot tell what a test was waiting for
BUILD_S = 600.0  # a template from nothing fetches Debian; most often its parts are there
PROMISED_S = 5.0  # by then nothing is left of a machine, whatever ended it
LOOK_AGAIN_S = 0.02  # between two looks at what nothing announces, such as the process table

Found = TypeVar("Found")


def slowdown() -> float:
    """How much slower this host is than an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def promised(seconds: float = PROMISED_S) -> float:
    """What a promise of so many seconds comes to on this host at the moment."""
    return seconds * slowdown()


async def assert_soon_empty(look: Callable[[], Found], within_s: float) -> None:
    """Wait until `look` finds nothing any more."""
    found = look()
    with anyio.move_on_after(within_s):
        while found:
            await anyio.sleep(LOOK_AGAIN_S)
            found = look()
    assert not found, "still there"
