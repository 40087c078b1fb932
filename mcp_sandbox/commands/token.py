"""`mcp-sandbox token`: who may use a shared server."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from mcp_sandbox.accounts.tokens import Scope, Tokens
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings

DAY_S = 86_400


def create(settings: Settings, name: str, *, operate: bool, days: float | None, requests_per_minute: int | None) -> int:
    """Create a token and print it on stdout, alone, so that a script can keep it."""

    def main() -> int:
        scopes: tuple[Scope, ...] = ("use", "operate") if operate else ("use",)
        ttl_s = None if days is None else days * DAY_S
        with closing(Tokens(settings.home)) as tokens:
            secret = tokens.create(name, scopes, ttl_s=ttl_s, requests_per_minute=requests_per_minute)
        sys.stdout.write(f"{secret}\n")
        sys.stderr.write("Keep it: it is not shown again. A server that was started without tokens must restart.\n")
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
        table = Table("name", "scopes", "expires", "last use", box=None)
        for token in known:
            table.add_row(token.name, ", ".join(token.scopes), _date(token.expires), _date(token.last_used))
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


def _date(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
