"""The product: MCP tools, service, command line, and the SDK (`from mcp_sandbox import Sandbox, AsyncSandbox`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcp_sandbox.sdk import AsyncSandbox, Sandbox

__all__ = ["AsyncSandbox", "Sandbox"]


def __getattr__(name: str) -> object:
    """Import the SDK when it is first asked for: commands must not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mcp_sandbox import sdk

    return getattr(sdk, name)
