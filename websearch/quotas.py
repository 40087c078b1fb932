"""What each owner may use of the web: counts that decide without waiting, with the clock handed in."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from websearch.policy import Verdict, refused

MINUTE_S, DAY_S = 60.0, 86_400.0
MIB = 1024 * 1024
KNOWN_NAMES = 256  # of one owner that are not new when they are looked up again


class Quotas(BaseModel):
    """Limits on one request, and on one owner."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_bytes: int = 32 * MIB
    response_bytes: int = 512 * MIB
    time_s: float = 600.0
    connections: int = 32  # of one owner at the same time
    requests_per_minute: int = 300
    names_per_minute: int = 60  # that one owner has not looked up before: names can carry data out
    bytes_per_day: int = 4096 * MIB  # both directions


@dataclass(slots=True)
class _Account:
    requests: float  # that may be made now; grows with time
    names: float  # that may be new now; grows with time
    updated: float
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)  # names, the one used last at the end
    day: float = 0.0  # when the count of bytes began
    bytes: int = 0
    connections: int = 0


class Ledger:
    """Counts what owners use."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self.quotas = quotas
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def connect(self, owner: str) -> Verdict:
        """Count a new connection. If it is allowed, `disconnect` must follow."""
        account = self._account(owner)
        if account.connections >= self.quotas.connections:
            return refused("quota-connections", f"{self.quotas.connections} connections are open already")
        account.connections += 1
        return Verdict(True, "quota")

    def disconnect(self, owner: str) -> None:
        """Count a connection that has ended, and forget owners that nothing is to be remembered of."""
        self._account(owner).connections -= 1
        for name, account in list(self._accounts.items()):
            self._account(name)  # brings it up to date
            if account.connections or account.bytes:
                continue
            if account.requests >= self.quotas.requests_per_minute and account.names >= self.quotas.names_per_minute:
                del self._accounts[name]

    def request(self, owner: str) -> Verdict:
        """Count a new request."""
        account = self._account(owner)
        if account.bytes >= self.quotas.bytes_per_day:
            return refused(
                "quota-bytes", f"{self.quotas.bytes_per_day} bytes were transferred today; wait until tomorrow"
            )
        if account.requests < 1:
            return refused("quota-requests", f"{self.quotas.requests_per_minute} requests a minute are allowed; wait")
        account.requests -= 1
        return Verdict(True, "quota")

    def look_up(self, owner: str, name: str) -> Verdict:
        """Count a name that is about to be looked up, unless the owner has done so before."""
        account = self._account(owner)
        if name not in account.known:
            if account.names < 1:
                return refused("quota-names", f"{self.quotas.names_per_minute} new names a minute are allowed; wait")
            account.names -= 1
        account.known[name] = None
        account.known.move_to_end(name)
        if len(account.known) > KNOWN_NAMES:
            account.known.popitem(last=False)
        return Verdict(True, "quota")

    def transfer(self, owner: str, size: int) -> bool:
        """Count bytes; returns whether the owner may go on."""
        account = self._account(owner)
        account.bytes += size
        return account.bytes <= self.quotas.bytes_per_day

    def _account(self, owner: str) -> _Account:
        now, requests, names = self._clock(), self.quotas.requests_per_minute, self.quotas.names_per_minute
        account = self._accounts.setdefault(owner, _Account(requests, names, updated=now, day=now))
        minutes = (now - account.updated) / MINUTE_S
        account.requests = min(requests, account.requests + minutes * requests)
        account.names = min(names, account.names + minutes * names)
        account.updated = now
        if now - account.day >= DAY_S:
            account.day, account.bytes = now, 0
        return account
