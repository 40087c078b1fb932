"""Runs a cell whose effects no later code notices: see `AgentClient.rehearse`."""

import gc
import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_trace(shell: Any) -> Iterator[None]:  # noqa: ANN401 - IPython's InteractiveShell
    """Restore what a cell can change without meaning to: variables, environment, directory; and collect its garbage.

    The cell's modules stay, and so do settings of libraries that it changes. The warm-up ends with the same cell, so
    the modules are there in every machine.
    """
    variables, environment, directory = shell.user_ns, dict(os.environ), os.getcwd()  # noqa: PTH109 - pathlib is slow
    shell.user_ns = dict(variables)
    try:
        yield
    finally:
        shell.user_ns = variables
        linecache.cache.pop("<cell 0>", None)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(directory)
        gc.collect()
