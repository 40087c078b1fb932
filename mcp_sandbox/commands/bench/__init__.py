"""`mcp-sandbox bench`: the numbers we promise, measured on this host, as ratios within one run."""
