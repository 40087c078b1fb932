"""The ladder of fixtures up to a real machine."""

from tests.functional.bubblewrap_harness import bubblewrap, inside
from tests.functional.machines import anyio_backend, built, clone, host, in_force, loaded, machines, shared, subject

__all__ = [
    "anyio_backend",
    "bubblewrap",
    "built",
    "clone",
    "host",
    "in_force",
    "inside",
    "loaded",
    "machines",
    "shared",
    "subject",
]
