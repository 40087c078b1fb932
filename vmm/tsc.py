"""The frequency of this host's time stamp counter.

An emulated guest reads the host's counter and measures its frequency against a chip that QEMU emulates. On a busy host
that fails and the boot hangs. So we measure the frequency here and pass it to the guest.
"""

import ctypes
import mmap
import platform
import time
from functools import cache
from typing import cast

RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
MEASURE_S = 0.05  # long enough for an error below 0.01 %
READINGS = 50  # the fastest of them was not interrupted


@cache
def tsc_khz() -> int | None:
    """Return the counter's frequency in kHz, or None if it cannot be measured."""
    if platform.machine() != "x86_64":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # hardened kernels forbid memory that is writable and executable
        return None
    page.write(RDTSC)
    read_counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def reading() -> tuple[int, int]:
        """Return nanoseconds and ticks at the same moment."""
        best: tuple[int, int, int] | None = None
        for _ in range(READINGS):
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
            ticks = cast("int", read_counter())
            width = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - before
            if best is None or width < best[0]:
                best = (width, before + width // 2, ticks)
        assert best is not None
        return best[1], best[2]

    ns_1, ticks_1 = reading()
    time.sleep(MEASURE_S)
    ns_2, ticks_2 = reading()
    return round((ticks_2 - ticks_1) * 1_000_000 / (ns_2 - ns_1))
