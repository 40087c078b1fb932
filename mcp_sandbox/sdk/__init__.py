"""Sandboxes for Python programs, on a server or in the program's own process."""

from mcp_sandbox.sdk.blocking import Sandbox
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.sdk.sandbox import AsyncSandbox

__all__ = ["AsyncSandbox", "RunResult", "Sandbox"]
