"""The command that clients start: an MCP server on stdio. They wait for it, so it does not import the command line."""

import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mcp_sandbox.config import Settings
    from mcp_sandbox.serving.early import EarlyGreeting

EXIT_USAGE = 2


def fail(message: str, code: int = 1) -> NoReturn:
    """Print a message on stderr and exit."""
    sys.stderr.write(f"mcp-sandbox: {message}\n")
    sys.exit(code)


def open_settings(**flags: Any) -> "Settings":  # noqa: ANN401 - pydantic checks them
    """Return the settings for a command line, with a home that is closed to other users. Exits if that fails."""
    from mcp_sandbox.config import ConfigError, load_settings
    from vmm.errors import Untrusted
    from vmm.trust import make_private

    try:
        settings = load_settings(**flags)
        if make_private(settings.home):
            sys.stderr.write(f"mcp-sandbox: other users could read {settings.home}; its mode is 0700 now\n")
    except (ConfigError, Untrusted) as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:  # of the home, or of a working directory that is gone
        fail(str(error))
    return settings


def greet_and_run() -> int:
    """Serve as `run` does, with the settings of this host. The client is greeted before anything else, if possible."""
    from mcp_sandbox.serving.early import greet_early

    early = greet_early()
    return run(open_settings(), early)


def run(settings: "Settings", early: "EarlyGreeting | None" = None) -> int:
    """Serve MCP on stdio until the client leaves, or relay it to the shared server that the settings name."""
    if settings.connect:
        from mcp_sandbox.connect.relay import run as run_relay

        return run_relay(settings.connect, settings.token)
    from mcp_sandbox.serving.stdio_server import run_stdio

    try:
        run_stdio(settings, early)
    except Exception as error:
        from mcp_sandbox.commands.common import report

        return report(error)
    return 0
