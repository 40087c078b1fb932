"""The product: MCP tools, service, command line."""
