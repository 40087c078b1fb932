"""`mcp-sandbox logs`: the output of a run on a server, as it comes."""

import sys

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.client import Event, Server, refusal_of
from mcp_sandbox.commands.remote.errors import NoActiveRun, ServerUnreachable
from mcp_sandbox.commands.remote.sandboxes import path_of, server_for
from mcp_sandbox.commands.run_output import exit_code, write_output
from mcp_sandbox.config import Settings
from mcp_sandbox.views import RunView

RECONNECTS = 5  # in a row, without an event in between


def show(settings: Settings, url: str | None, sandbox_id: str, run_id: str | None, *, follow: bool) -> int:
    """Print what a run has written so far; with `follow`, until it ends: then its exit code is returned."""

    def work() -> int:
        server = server_for(settings, url)
        box = path_of(sandbox_id)
        run = run_id or next(reversed(server.get(box)["run_ids"]), None)
        if run is None:
            raise NoActiveRun(sandbox_id)
        return follow_run(server, f"{box}/runs/{run}/events") if follow else _print(server, f"{box}/runs/{run}")

    return report_errors(work)


def _print(server: Server, run: str) -> int:
    offset, size = 0, 1
    while offset < size:
        page = server.get(run, offset=offset)["page"]
        write_output(sys.stdout, page["text"])
        if page["end"] <= offset:
            break
        offset, size = page["end"], page["size"]
    return 0


def follow_run(server: Server, stream: str) -> int:
    """Print the output of a run until it ends; returns its exit code."""
    last_id: str | None = None
    failures = 0
    while True:
        try:
            for event in server.events(stream, last_id):
                last_id, failures = event.id, 0
                if (code := _take(event)) is not None:
                    return code
            reason = "it ended the stream of events"
        except ServerUnreachable as error:
            reason = error.reason
        failures += 1
        if failures > RECONNECTS:
            raise ServerUnreachable(str(server.address), reason)


def _take(event: Event) -> int | None:
    """Print an event; returns an exit code if it was the last."""
    if event.kind == "output":
        write_output(sys.stdout, event.data["text"])
        sys.stdout.flush()
    elif event.kind == "result":
        return exit_code(RunView.model_validate({**event.data, "images": ()}, strict=False))
    elif event.kind == "error":
        raise refusal_of(event.data)
    return None
