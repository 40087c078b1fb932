"""Run the `mcp-sandbox` command as `python -m mcp_sandbox`."""

from mcp_sandbox.start import start

start()
