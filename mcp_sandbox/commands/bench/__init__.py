"""`mcp-sandbox bench`: measure on this host the numbers that docs/specification.md promises."""
