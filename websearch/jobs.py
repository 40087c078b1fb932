"""Work for the machine that reaches the web: jobs, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from websearch.access import Caller


class JobFailed(Exception):
    """A job has no answer. The worker says why, or the machine that it ran in is at fault.

    `code` is one of a worker's own, such as "dns", "tls", "refused", "timeout" or "http_status"; "worker" if the worker
    died or broke the protocol; "unavailable" if there is no machine. `fields` are a worker's: hostile text.
    """

    def __init__(self, code: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.fields = dict(fields or {})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker sent back. Every byte of it is untrusted."""

    header: dict[str, Any]
    body: bytes


class Jobs(Protocol):
    """Runs jobs in the machine that reaches the web."""

    async def run(self, kind: str, fields: Mapping[str, Any], *, caller: Caller, timeout_s: float) -> Answer:
        """Run one job in a process of its own; its connections belong to `caller`.

        Raises:
            JobFailed: there is no answer.
        """
        ...
