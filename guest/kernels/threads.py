"""Tells libraries that were loaded before a machine got its size how many threads to use."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123

import ctypes
import re

OPENBLAS = re.compile(r"/\S*openblas\S*\.so\S*$", re.MULTILINE)  # numpy's linear algebra, by any of its names
SET_THREADS = tuple(f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", ""))


def use_cpus(count: int) -> None:
    """Let linear algebra run on `count` CPUs. It counts them when it is loaded, which is before the snapshot."""
    with open("/proc/self/maps") as file:
        loaded = set(OPENBLAS.findall(file.read()))
    for path in loaded:
        library = ctypes.CDLL(path)
        set_threads = next((getattr(library, name) for name in SET_THREADS if hasattr(library, name)), None)
        if set_threads is not None:
            set_threads(count)
