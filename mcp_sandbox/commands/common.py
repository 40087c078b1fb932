"""What all commands share: how they tell people what went wrong, and how they start a server of their own."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mcp_types import CallToolResult

from mcp_sandbox.commands.next_steps import NEXT_STEPS
from mcp_sandbox.config import Settings, variable_of
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.views import RUN_META, RunView, with_next_step
from templates.errors import BuildFailed, TemplateError
from vmm.errors import DriverUnavailable, VmmError

EXIT_ERROR = 1
EXPECTED = (SandboxError, TemplateError, VmmError, OSError)  # not bugs of ours
SERVER = ("-m", "mcp_sandbox")  # arguments of this Python that make it an MCP server on stdio


def guarded(main: Callable[[], int]) -> int:
    """Run `main` to its exit status and print expected errors on stderr."""
    try:
        return main()
    except EXPECTED as error:
        tell(error)
    return EXIT_ERROR


def tell(error: Exception) -> None:
    """Print what went wrong and what to do next."""
    if isinstance(error, SandboxError):
        sys.stderr.write(f"mcp-sandbox: {with_next_step(error, NEXT_STEPS)}\n")
        return
    if isinstance(error, BuildFailed):
        sys.stderr.write(f"mcp-sandbox: {error}\n{error.log_tail}\nThe log: {error.log_path}\n")
        return
    fix = error.fix if isinstance(error, DriverUnavailable) else None
    sys.stderr.write(f"mcp-sandbox: {error}{f'; {fix}' if fix else ''}\n")


def run_of(result: CallToolResult) -> RunView:
    """Return the view of a finished run from the result of a tool."""
    view = (result.meta or {})[RUN_META]
    return RunView.model_validate({**view, "images": ()}, strict=False)


def environment(settings: Settings) -> dict[str, str]:
    """Return our environment plus the settings as variables, for a server that is to have the same settings."""
    values = settings.model_dump(mode="json", exclude_none=True)
    return {**os.environ, **dict(_variables(values))}


def _variables(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _variables(value, f"{name}.")
        else:
            text = os.pathsep.join(map(str, value)) if isinstance(value, list) else str(value)
            yield variable_of(f"{group}{name}"), text
