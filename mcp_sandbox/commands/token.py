"""`mcp-sandbox token`: who may use a shared server."""

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from mcp_sandbox.accounts.tokens import Scope, Token, Tokens
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.admission import Quota

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Grant:
    """What a new token may do."""

    owner: str | None
    read_only: bool
    operate: bool
    days: float | None
    sandboxes: int | None
    memory_mb: int | None
    runs: int | None
    requests_per_minute: int | None

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of the token."""
        return ("read" if self.read_only else "use", *(("operate",) if self.operate else ()))


def create(settings: Settings, name: str, grant: Grant) -> int:
    """Create a token and print it on stdout, alone, so that a script can keep it."""

    def main() -> int:
        with closing(Tokens(settings.home)) as tokens:
            secret = tokens.create(
                name,
                grant.scopes,
                owner=grant.owner,
                quota=Quota(grant.sandboxes, grant.memory_mb, grant.runs),
                ttl_s=None if grant.days is None else grant.days * DAY_S,
                requests_per_minute=grant.requests_per_minute,
            )
        sys.stdout.write(f"{secret}\n")
        sys.stderr.write("Keep it: it is not shown again. After the first token, send running servers a SIGHUP.\n")
        return 0

    return report_errors(main)


def show(settings: Settings, *, as_json: bool) -> int:
    """Print all tokens without their secrets."""

    def main() -> int:
        with closing(Tokens(settings.home)) as tokens:
            known = tokens.all()
        if as_json:
            sys.stdout.write(json.dumps([asdict(token) for token in known], indent=2) + "\n")
            return 0
        table = Table("name", "owner", "scopes", "quotas", "expires", "last use", box=None)
        for token in known:
            table.add_row(
                *(token.name, token.owner, ", ".join(token.scopes), _quotas(token)),
                *(_date(token.expires), _date(token.last_used)),
            )
        Console().print(table if known else "There are no tokens.")
        return 0

    return report_errors(main)


def revoke(settings: Settings, name: str) -> int:
    """Remove a token."""

    def main() -> int:
        with closing(Tokens(settings.home)) as tokens:
            tokens.revoke(name)
        return 0

    return report_errors(main)


def _quotas(token: Token) -> str:
    quotas = {**asdict(token.quota), "requests_per_minute": token.requests_per_minute}
    return ", ".join(f"{name} {value}" for name, value in quotas.items() if value is not None) or "none"


def _date(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
