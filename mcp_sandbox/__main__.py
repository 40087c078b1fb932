"""Run the `mcp-sandbox` command as `python -m mcp_sandbox`."""

from mcp_sandbox.cli import start

start()
