"""What a worker can do, by name."""

from collections.abc import Callable
from typing import Any

import httpx

from guest.web import fetch, search

# A job gets its fields and a client that goes through the host's bridge. It returns a JSON object and a body, or
# raises WebError. It runs in a process of its own.
Run = Callable[[dict[str, Any], httpx.Client], tuple[dict[str, Any], bytes]]

KINDS: dict[str, Run] = {"fetch": fetch.run, "search": search.run}
