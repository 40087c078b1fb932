"""Python, in IPython."""

from guest.languages import Kernel, Language

LANGUAGE = Language(
    title="Python",
    template="python-data-analysis",
    image="docker.io/library/python:3.13-slim",
    suffixes=(".py",),
    memory_mb=512,
    warm_cells=("1+1", "print(1)", "1/0"),
    rehearsal="print(1)\n1+1",
    stateful=True,
    in_process=True,
)


def kernel() -> Kernel:
    """Return the Python kernel, which needs IPython."""
    from guest.kernels import python

    return python
