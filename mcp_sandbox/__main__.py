"""`python -m mcp_sandbox` is the `mcp-sandbox` command."""

from mcp_sandbox.cli import app

app()
