"""How settings are called: in files, and as environment variables."""

import difflib
from collections.abc import Iterable

APP = "mcp-sandbox"
ENV_PREFIX = "MCP_SANDBOX_"


def variable_of(setting: str) -> str:
    """Return the environment variable of a setting such as `pool.min`."""
    return f"{ENV_PREFIX}{setting.replace('.', '_').upper()}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return what to add to an error about an unknown name, if a known one is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
