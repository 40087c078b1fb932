"""Shared by the commands: printing errors, and what it takes to start and read an MCP server as a child process."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from rich.markup import escape

from mcp_sandbox.commands.next_steps import NEXT_STEPS
from mcp_sandbox.config import Settings, WebSettings, variable_of
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.views import RUN_META, RunView, with_next_step
from templates.errors import BuildFailed, TemplateError
from vmm.errors import DriverUnavailable, VmmError

if TYPE_CHECKING:
    from mcp_types import CallToolResult
    from rich.status import Status

    from templates.build import Progress

EXIT_ERROR = 1
EXPECTED_ERRORS = (SandboxError, TemplateError, VmmError, OSError)  # anything else is a bug and ends in a traceback
# Arguments for this Python interpreter: an MCP server on stdio. -P: no module of the working directory is imported.
SERVER_ARGS = ("-P", "-m", "mcp_sandbox")


def report_errors(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code. Print an expected error on stderr and return EXIT_ERROR."""
    try:
        return main()
    except Exception as error:
        return report(error)


def report(error: Exception) -> int:
    """Print an expected error on stderr and return the exit code. Raise any other."""
    if not isinstance(error, EXPECTED_ERRORS):
        raise error
    print_error(error)
    return EXIT_ERROR


def print_error(error: Exception) -> None:
    """Print an error and the next step on stderr."""
    if isinstance(error, SandboxError):
        sys.stderr.write(f"mcp-sandbox: {with_next_step(error, NEXT_STEPS)}\n")
        return
    if isinstance(error, BuildFailed):
        sys.stderr.write(f"mcp-sandbox: {error}\n{error.log_tail}\nLog: {error.log_path}\n")
        return
    fix = error.fix if isinstance(error, DriverUnavailable) else None
    sys.stderr.write(f"mcp-sandbox: {error}{f'; {fix}' if fix else ''}\n")


def show_progress(status: "Status", progress: "Progress") -> None:
    """Show what a build or a download is doing in a status line."""
    if progress.state == "running":
        status.update(f"{progress.step} · {progress.elapsed_s:.0f} s · {escape(progress.message[-80:])}")


def run_of(result: "CallToolResult") -> RunView:
    """Return the finished run that a tool result carries, without its images."""
    view = (result.meta or {})[RUN_META]
    return RunView.model_validate({**view, "images": ()}, strict=False)


def text_of(result: "CallToolResult") -> str:
    """Return the text of a tool result."""
    from mcp_types import TextContent  # takes half a second, and most commands need no MCP

    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment for a child server with these settings: ours, plus a variable for each setting."""
    values = settings.model_dump(mode="json", exclude_none=True, exclude={"connect", "token"})
    inherited = {name: value for name, value in os.environ.items() if name != variable_of("connect")}
    return {**inherited, **dict(_variables(values)), **dict(_keys(settings.web))}


def _keys(web: WebSettings) -> Iterator[tuple[str, str]]:
    """Yield the API keys, which a dump of the settings hides."""
    for name, value in web:
        if isinstance(value, SecretStr):
            yield variable_of(f"web.{name}"), value.get_secret_value()


def _variables(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict) and not group:
            yield from _variables(value, f"{name}.")
        else:
            separator = os.pathsep if name == "template_path" else ","
            yield variable_of(f"{group}{name}"), separator.join(_values(value))


def _values(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{name}={inner}" for name, inner in value.items())
    else:
        yield from map(str, value if isinstance(value, list) else [value])
