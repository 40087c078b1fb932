"""`mcp-sandbox sandbox list|close` and `mcp-sandbox metrics`: for operators, of all servers of this home."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.operating import database
from mcp_sandbox.operating.control import ControlError, Request, ServerGone, ask, live_servers
from mcp_sandbox.operating.metrics import merge
from mcp_sandbox.operating.registry import ServerStatus, status_of, this_server
from vmm.process_table import ProcessId

LOOK_S = 5.0  # a server answers at once; one that hangs must not keep the others from being shown

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class View:
    """What is known about all servers of a home: from those that answer by themselves, of others from the registry."""

    sandboxes: list[dict[str, Any]]
    others: list[dict[str, Any]]  # machines on record whose server does not answer
    servers: int


def look(settings: Settings) -> View:
    """Ask all servers, then read the registry about the rest."""
    sandboxes: list[dict[str, Any]] = []
    answered: set[ProcessId] = set()
    for server, listed in ask_all(settings, Request(do="list")).items():
        answered.add(server)
        sandboxes += [{**sandbox, "server": server.pid} for sandbox in listed]
    return View(sandboxes, _on_record(settings, answered), len(answered))


def ask_all(settings: Settings, request: Request) -> Mapping[ProcessId, Any]:
    """The answers of all servers that give one; the others are named on stderr."""
    answers = {}
    for server in live_servers(settings.run_dir):
        try:
            answers[server] = ask(settings.run_dir, server, request, timeout_s=LOOK_S)
        except ControlError as error:
            err.print(f"mcp-sandbox: {escape(str(error))}", soft_wrap=True)
    return answers


def _on_record(settings: Settings, answered: set[ProcessId]) -> list[dict[str, Any]]:
    known = database.read_home(settings.home)
    here = this_server(settings.home) if known else None
    return [
        {
            "id": machine.sandbox or machine.machine_id or machine.id,
            "owner": machine.owner or "",
            "template": machine.template,
            "state": "left over" if status_of(server, here) is ServerStatus.GONE else "no answer",
            "age_s": max(0.0, time.time() - machine.created),
            "server": server.process.pid,
        }
        for server, machines in known.items()
        for machine in machines
        if server.process not in answered and here is not None
    ]


def show(settings: Settings, *, as_json: bool) -> int:
    """List all sandboxes."""
    view = look(settings)
    rows = [*view.sandboxes, *view.others]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    if rows:
        table = Table(Column("sandbox", no_wrap=True), "owner", "template", "state", "age", "ends in", "server")
        for row in rows:
            ends = f"{row['expires_in_s']:.0f} s" if "expires_in_s" in row else ""
            words = (row["id"], row["owner"], row["template"], row["state"], f"{row['age_s']:.0f} s", ends)
            table.add_row(*map(escape, words), str(row["server"]))
        out.print(table)
    err.print(f"Sandboxes: {len(view.sandboxes)}. Servers that answered: {view.servers}.")
    if any(row["state"] == "left over" for row in view.others):
        err.print("What killed servers have left is removed when the next server starts.")
    return 0


def close(settings: Settings, sandbox_id: str) -> int:
    """Close a sandbox, whichever server has it and whoever owns it."""
    return report_errors(lambda: _close(settings, sandbox_id))


def _close(settings: Settings, sandbox_id: str) -> int:
    view = look(settings)
    owner = next((row["server"] for row in view.sandboxes if row["id"] == sandbox_id), None)
    server = next((server for server in live_servers(settings.run_dir) if server.pid == owner), None)
    if server is not None:
        was_alive = ask(settings.run_dir, server, Request(do="close", sandbox_id=sandbox_id))
        err.print(f"{escape(sandbox_id)} is closed." if was_alive else f"{escape(sandbox_id)} had ended before.")
        return 0
    silent = next((row for row in view.others if row["id"] == sandbox_id), None)
    if silent is None:
        raise ControlError(f"No running server has a sandbox {sandbox_id!r}; `mcp-sandbox sandbox list` shows all.")
    if silent["state"] == "left over":
        raise ServerGone(f"Server {silent['server']} is gone, and its sandboxes ended with it; the next one cleans up.")
    raise ServerGone(f"Server {silent['server']}, which has {sandbox_id!r}, does not answer. Ending it ends them all.")


def print_metrics(settings: Settings) -> int:
    """Print the numbers of all servers, for node_exporter's textfile collector."""
    texts = {str(server.pid): text for server, text in ask_all(settings, Request(do="metrics")).items()}
    sys.stdout.write(merge(texts))
    return 0
