"""`mcp-sandbox sandbox list`, `sandbox close` and `metrics`: for operators, about all servers of a home."""

import json
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxClosed, SandboxNotFound
from mcp_sandbox.operating import database
from mcp_sandbox.operating.control import ControlError, Request, ServerGone, ask, live_servers
from mcp_sandbox.operating.metrics import merge
from mcp_sandbox.operating.registry import ServerStatus, status_of, this_server
from mcp_sandbox.views import ServedSandbox
from vmm.process_table import ProcessId

ANSWER_TIMEOUT_S = 5.0  # a server answers at once; one that hangs must not delay the others for long
LEFT_OVER = "left over"
NO_ANSWER = "no answer"

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Overview:
    """The sandboxes of all servers of a home."""

    live: list[ServedSandbox]  # reported by their servers
    recorded: list[ServedSandbox]  # in the registry only: their server does not answer
    servers: int  # that answered


def overview(settings: Settings) -> Overview:
    """Ask all servers, then read the registry about those that do not answer."""
    answers = ask_all(settings, Request(do="list"))
    live = [ServedSandbox.model_validate(row) for listed in answers.values() for row in listed]
    return Overview(live, _recorded(settings, answers.keys()), len(answers))


def ask_all(settings: Settings, request: Request) -> Mapping[ProcessId, Any]:
    """Return the answers of all servers. Print an error for each that does not answer."""
    answers = {}
    for server in live_servers(settings.run_dir):
        try:
            answers[server] = ask(settings.run_dir, server, request, timeout_s=ANSWER_TIMEOUT_S)
        except ControlError as error:
            err.print(f"mcp-sandbox: {escape(str(error))}", soft_wrap=True)
    return answers


def _recorded(settings: Settings, answered: Collection[ProcessId]) -> list[ServedSandbox]:
    known = database.read_home(settings.home)
    here = this_server(settings.home) if known else None
    return [
        ServedSandbox(
            sandbox_id=machine.sandbox or machine.machine_id or machine.id,
            owner=machine.owner,
            template=machine.template,
            state=LEFT_OVER if status_of(server, here) is ServerStatus.GONE else NO_ANSWER,
            age_s=round(max(0.0, time.time() - machine.created), 1),
            machine_id=machine.machine_id,
            server_pid=server.process.pid,
        )
        for server, machines in known.items()
        for machine in machines
        if server.process not in answered and here is not None
    ]


def show(settings: Settings, *, as_json: bool) -> int:
    """Print all sandboxes as a table or as JSON."""
    found = overview(settings)
    listed = [*found.live, *found.recorded]
    if as_json:
        sys.stdout.write(json.dumps([view.model_dump(mode="json") for view in listed], indent=2) + "\n")
        return 0
    if listed:
        table = Table(
            Column("sandbox", no_wrap=True), "owner", "template", "network", "state", "age", "ends in", "server"
        )
        for view in listed:
            ends = "" if view.expires_in_s is None else f"{view.expires_in_s:.0f} s"
            known = (view.sandbox_id, view.owner or "", view.template, view.network or "", view.state)
            table.add_row(*map(escape, known), f"{view.age_s:.0f} s", ends, str(view.server_pid))
        out.print(table)
    err.print(f"Sandboxes: {len(found.live)}. Servers that answered: {found.servers}.")
    if any(view.state == LEFT_OVER for view in found.recorded):
        err.print("The next server removes what killed servers left.")
    return 0


def close(settings: Settings, sandbox_id: str) -> int:
    """Close a sandbox of any owner, on any server of this home."""
    return report_errors(lambda: _close(settings, sandbox_id))


def _close(settings: Settings, sandbox_id: str) -> int:
    found = overview(settings)
    pid = next((view.server_pid for view in found.live if view.sandbox_id == sandbox_id), None)
    server = next((server for server in live_servers(settings.run_dir) if server.pid == pid), None)
    if server is not None:
        was_alive = ask(settings.run_dir, server, Request(do="close", sandbox_id=sandbox_id))
        err.print(f"{escape(sandbox_id)} is closed." if was_alive else f"{escape(sandbox_id)} had already ended.")
        return 0
    recorded = next((view for view in found.recorded if view.sandbox_id == sandbox_id), None)
    if recorded is None:
        raise SandboxNotFound(sandbox_id)
    if recorded.state == LEFT_OVER:
        raise SandboxClosed(sandbox_id, f"it ended with server {recorded.server_pid}")
    raise ServerGone(f"Server {recorded.server_pid}, which has {sandbox_id!r}, does not answer.")


def print_metrics(settings: Settings) -> int:
    """Print the metrics of all servers, for the textfile collector of node_exporter."""
    texts = {str(server.pid): text for server, text in ask_all(settings, Request(do="metrics")).items()}
    sys.stdout.write(merge(texts))
    return 0
