"""Where the program starts. A client that connects to a shared server does not wait for the rest to be imported."""

import gc
import os
import sys
from collections.abc import Mapping, Sequence

from mcp_sandbox.private import keep_private

VARIABLE = "MCP_SANDBOX_CONNECT"
COMPLETION = "_MCP_SANDBOX_COMPLETE"
TOKEN_VARIABLE = "MCP_SANDBOX_TOKEN"  # noqa: S105 - a name


def start() -> None:
    """Run the command line as a process of its own."""
    arguments = sys.argv[1:]
    url = connect_url(arguments, os.environ)
    if url is not None:
        from mcp_sandbox.connect.relay import run

        sys.exit(run(url, os.environ.get(TOKEN_VARIABLE)))
    gc.disable()  # a sixth of the time that imports take: they create much, and none of it is garbage
    keep_private()
    if not arguments and COMPLETION not in os.environ:
        from mcp_sandbox import stdio_command

        sys.exit(stdio_command.greet_and_run())
    from mcp_sandbox.cli import app

    app()


def connect_url(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the server to connect to, if nothing else is asked for. The command line knows more ways to name it."""
    if COMPLETION in environment:  # a shell wants to know what could come next
        return None
    match arguments:
        case ["--connect", url]:
            return url
        case [option] if option.startswith("--connect="):
            return option.removeprefix("--connect=")
        case []:
            return environment.get(VARIABLE) or None
        case _:
            return None
