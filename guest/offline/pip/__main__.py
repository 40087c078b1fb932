"""Implements `python -m pip`: runs the real pip, if there is one, and prints advice if it cannot install."""

import os
import runpy
import sys
from importlib.util import find_spec

from . import ADVICE, NETWORK, unload

INSTALLS = {"install", "download", "wheel"}


def main() -> int:
    """Run pip, and print advice if it fails offline."""
    unload()
    status = _run_pip() if find_spec("pip") else 1
    offline = not os.path.exists(NETWORK)  # noqa: PTH110 - pathlib is slow to load
    if status and offline and (INSTALLS & {*sys.argv} or not find_spec("pip")):
        sys.stderr.write(f"pip: {ADVICE.format(field='wheels')}\n")
    return status


def _run_pip() -> int:
    try:
        runpy.run_module("pip", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
