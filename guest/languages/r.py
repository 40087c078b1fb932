"""R."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH100, PTH118, PTH120

import os

from guest.kernels import hosted
from guest.languages import Language

LANGUAGE = Language(
    title="R",
    template="r",
    image="docker.io/library/r-base:4.5.1",
    suffixes=(".R", ".r"),
    version=("Rscript", "--no-init-file", "--no-environ", "-e", 'cat(format(getRversion()), "\\n")'),
    warm_cells=("1 + 1", "print(summary(c(1, 2)))", "plot(1)", "stop('warm')"),
    rehearsal=None,
    stateful=True,
)
HOST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "r.R")


def command(_memory_mb: int) -> list[str]:
    """Return the command."""
    return ["Rscript", "--no-save", "--no-restore", HOST]


def kernel() -> hosted.Service:
    """Return the kernel."""
    return hosted.Service(command)
