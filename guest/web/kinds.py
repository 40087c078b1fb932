"""What a worker can do, by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from guest.web import fetch, search
from guest.web.offline import Reading, Result, Work


class Kind(NamedTuple):
    """How a job of one kind is done: one process has the network, and gives what it got to another that has none.

    `run` gets the job's fields, a client that goes through the host's bridge, and the other process. `read` runs there.
    """

    run: Callable[[dict[str, Any], httpx.Client, Reading], Result]
    read: Work


KINDS = {"fetch": Kind(fetch.run, fetch.read), "search": Kind(search.run, search.read)}


def read(order: dict[str, Any], data: bytes) -> Result:
    """Read what a job of the kind in `order` got. Runs without a network."""
    return KINDS[order["kind"]].read(order, data)
