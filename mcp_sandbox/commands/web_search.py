"""`mcp-sandbox web search`: search the web from the command line, with the machine that the web tools use."""

import sys

from rich.console import Console
from rich.markup import escape

from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.run import OWNER
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import SearchView
from websearch.search import SearchRequest

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main(settings: Settings, request: SearchRequest, *, as_json: bool) -> int:
    """Search, print the results and return an exit code."""

    async def search() -> int:
        with err.status("searching"):
            async with open_host(settings) as host, open_service(host, pooled=False) as service:
                view = await service.web.search(OWNER, request)
        if as_json:
            sys.stdout.write(view.model_dump_json(indent=2) + "\n")
        else:
            show(view)
        return 0

    return report_errors(lambda: run_command(search))


def show(view: SearchView) -> None:
    """Print the results, and on stderr what went wrong."""
    for result in view.results:
        origin = " · ".join(filter(None, (result.published, result.engine)))
        out.print(f"[bold]{result.rank}. {escape(result.title)}[/]", soft_wrap=True)
        out.print(f"   {escape(result.url)}", style="blue", soft_wrap=True)
        out.print(f"   {escape(result.snippet)} [dim]({escape(origin)})[/]", soft_wrap=True)
    if not view.results:
        err.print("Nothing was found.")
    for error in view.errors:
        err.print(f"mcp-sandbox: {escape(error.engine)} did not answer: {escape(error.message)}", soft_wrap=True)
