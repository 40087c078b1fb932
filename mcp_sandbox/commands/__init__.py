"""The commands of `mcp-sandbox`, one module each; `mcp_sandbox.cli` has their flags."""
