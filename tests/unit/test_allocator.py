"""Memory that a process has freed, and what the C library does with it."""

import ctypes
from pathlib import Path

from guest.allocator import return_freed_memory

BLOCK, COUNT = 64 * 1024, 512  # 32 MB in blocks that are too small to be returned one by one


def resident() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_freed_below_memory_in_use_is_returned():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(ctypes.c_size_t(BLOCK)) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    in_use = blocks[::16]  # so that the heap cannot simply shrink
    for block in set(blocks) - set(in_use):
        libc.free(block)
    before = resident()
    return_freed_memory()
    assert before - resident() > BLOCK * COUNT // 2
    for block in in_use:
        libc.free(block)
