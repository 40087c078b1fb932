"""Tunes the C library's allocator: in gVisor, memory that a process gets anew is expensive."""

import ctypes

MIB = 1024 * 1024
# Options of `mallopt`. By default the allocator returns what the picture of a figure took, and asks for it again.
OPTIONS = {
    -1: 32 * MIB,  # M_TRIM_THRESHOLD: how much may be free at the end of the heap before it shrinks
    -2: MIB,  # M_TOP_PAD: how much the heap grows at least
    -3: 16 * MIB,  # M_MMAP_THRESHOLD: only what is larger is returned as soon as it is freed
}


def keep_freed_memory() -> None:
    """Let this process and its forks keep some of the memory that they free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        for option, value in OPTIONS.items():
            mallopt(option, value)


def return_freed_memory() -> None:
    """Return what this process has freed and kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
