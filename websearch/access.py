"""What became of one request of a guest: counted while it goes on, logged once when it has ended."""

import logging
import time
from dataclasses import dataclass, field

from websearch.policy import Verdict
from websearch.quotas import Ledger

log = logging.getLogger(__name__)


class LimitReached(Exception):
    """A request went over one of its limits; `verdict` names it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a connection belongs to."""

    owner: str
    sandbox: str


@dataclass(slots=True)
class Access:
    """One request, and what it has used."""

    caller: Caller
    ledger: Ledger
    target: str = "?"  # host:port
    verdict: Verdict = field(default_factory=lambda: Verdict(False, "unfinished"))
    sent: int = 0  # bytes from the guest
    received: int = 0  # bytes to the guest
    started: float = field(default_factory=time.monotonic)

    def count_sent(self, size: int) -> None:
        """Count bytes on their way out. Raises LimitReached."""
        self.sent += size
        self._check(size, self.sent, self.ledger.quotas.request_bytes, "request")

    def count_received(self, size: int) -> None:
        """Count bytes on their way in. Raises LimitReached."""
        self.received += size
        self._check(size, self.received, self.ledger.quotas.response_bytes, "response")

    def _check(self, size: int, total: int, limit: int, what: str) -> None:
        if total > limit:
            raise LimitReached(Verdict(False, f"{what}-bytes", f"the {what} has more than {limit} bytes"))
        if not self.ledger.transfer(self.caller.owner, size):
            raise LimitReached(Verdict(False, "quota-bytes", "the bytes of today are used up"))

    def write_log(self) -> None:
        """Write the one line of this request."""
        log.info(
            "owner=%s sandbox=%s target=%s verdict=%s rule=%s sent=%d received=%d duration_ms=%d",
            self.caller.owner,
            self.caller.sandbox,
            self.target,
            "allowed" if self.verdict.allowed else "refused",
            self.verdict.rule,
            self.sent,
            self.received,
            (time.monotonic() - self.started) * 1000,
        )
