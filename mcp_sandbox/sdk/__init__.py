"""Sandboxes for Python programs, on a server or in the program's own process."""

from mcp_sandbox.sdk.blocking import Run, Sandbox
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.sdk.runs import AsyncRun
from mcp_sandbox.sdk.sandbox import AsyncSandbox

__all__ = ["AsyncRun", "AsyncSandbox", "Run", "RunResult", "Sandbox"]
