"""`mcp-sandbox web fetch`: fetch a page from the command line, with the machine that the web tools use."""

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.run import OWNER
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import PageView
from mcp_sandbox.web.fetching import FetchRequest

err = Console(stderr=True, highlight=False)


def main(settings: Settings, request: FetchRequest, *, as_json: bool, output: Path | None) -> int:
    """Fetch a page, print or save it and return an exit code."""

    async def fetch() -> int:
        with err.status("fetching"):
            async with open_host(settings) as host, open_service(host, pooled=False) as service:
                view, data = await service.web.fetch(OWNER, request)
        if output is not None:
            output.write_bytes(data)
        if as_json:
            sys.stdout.write(view.model_dump_json(indent=2) + "\n")
        else:
            show(view, saved=output)
        return 0

    return report_errors(lambda: run_command(fetch))


def show(view: PageView, *, saved: Path | None) -> None:
    """Print the text, and on stderr what is known about the page."""
    title = f"{view.title} · " if view.title else ""
    facts = f"{title}{view.final_url} · {view.status} · {view.content_type} · {view.bytes:,} bytes"
    err.print(escape(facts), style="dim", soft_wrap=True)
    for warning in view.warnings:
        err.print(f"mcp-sandbox: {escape(warning)}", soft_wrap=True)
    if saved is not None:
        err.print(f"saved as {escape(str(saved))}", soft_wrap=True)
    elif view.text is None:
        err.print("mcp-sandbox: the content is not text; save it with --output FILE.")
    else:
        sys.stdout.write(view.text + "\n")
    if view.next_start_index is not None and saved is None:
        err.print(f"{view.next_start_index:,} of {view.total_chars:,} characters; --max-chars shows more.")
