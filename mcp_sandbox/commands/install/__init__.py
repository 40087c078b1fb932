"""`mcp-sandbox install CLIENT`: write the server into a client's configuration."""
