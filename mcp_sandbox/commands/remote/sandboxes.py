"""`mcp-sandbox sandbox create|list|show|close|fork` on a server."""

import json
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.address import find_server
from mcp_sandbox.commands.remote.client import Server
from mcp_sandbox.config import Settings

SANDBOXES = "/sandboxes"

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def create(settings: Settings, url: str | None, wanted: Mapping[str, Any], *, as_json: bool) -> int:
    """Create a sandbox and print its id."""

    def work() -> int:
        body = {name: value for name, value in wanted.items() if value is not None}
        box = server_for(settings, url).post(SANDBOXES, body)
        if as_json:
            print_json(box)
        else:
            out.print(box["sandbox_id"], markup=False)
        return 0

    return report_errors(work)


def list_all(settings: Settings, url: str, *, as_json: bool) -> int:
    """Print the caller's sandboxes on a server."""

    def work() -> int:
        boxes = _all(server_for(settings, url))
        if as_json:
            print_json(boxes)
        elif boxes:
            table = Table(Column("sandbox", no_wrap=True), "template", "network", "state", "age", "ends in")
            for box in boxes:
                known = (box[name] for name in ("sandbox_id", "template", "network", "state"))
                table.add_row(*map(escape, known), f"{box['age_s']:.0f} s", f"{box['expires_in_s']:.0f} s")
            out.print(table)
        return 0

    return report_errors(work)


def _all(server: Server) -> list[dict[str, Any]]:
    boxes: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None:
        page = server.get(SANDBOXES, offset=offset)
        boxes += page["sandboxes"]
        offset = page["next_offset"] if page["sandboxes"] else None
    return boxes


def show(settings: Settings, url: str | None, sandbox_id: str, *, as_json: bool) -> int:
    """Print all that a server says about a sandbox."""

    def work() -> int:
        box = server_for(settings, url).get(path_of(sandbox_id))
        if as_json:
            print_json(box)
            return 0
        table = Table(show_header=False)
        for name, value in box.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
            table.add_row(name.replace("_", " "), escape(text))
        out.print(table)
        return 0

    return report_errors(work)


def close(settings: Settings, url: str, sandbox_id: str) -> int:
    """Close one of the caller's sandboxes."""

    def work() -> int:
        closed = server_for(settings, url).delete(path_of(sandbox_id))["closed"]
        err.print(f"{escape(sandbox_id)} {'is closed' if closed else 'had already ended'}.")
        return 0

    return report_errors(work)


def fork(settings: Settings, url: str | None, sandbox_id: str, count: int, reseed: str, *, as_json: bool) -> int:
    """Copy a sandbox and print the ids of the copies."""

    def work() -> int:
        wanted = {"count": count, "reseed": reseed}
        copies = server_for(settings, url).post(f"{path_of(sandbox_id)}/fork", wanted)["copies"]
        if as_json:
            print_json(copies)
        else:
            for copy in copies:
                out.print(copy["sandbox_id"], markup=False)
        return 0

    return report_errors(work)


def server_for(settings: Settings, url: str | None) -> Server:
    """Return the server that a command uses. Raises BadUrl, NoServer."""
    return Server(find_server(settings, url))


def path_of(sandbox_id: str) -> str:
    """Return where a sandbox is on its server."""
    return f"{SANDBOXES}/{quote(sandbox_id, safe='') or '-'}"


def print_json(value: object) -> None:
    """Print a value for programs."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
