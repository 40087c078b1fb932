"""The MCP face: tools, one module for each family, and how results become text."""
