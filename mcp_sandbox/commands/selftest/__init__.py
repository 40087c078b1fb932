"""`mcp-sandbox selftest`: check on this host that sandboxes work, and that they hold what they promise.

`cases` is the list of all checks. tests/security runs the same ones on every driver. `inside` is what is tried in a
sandbox; the other modules run on the host and use sandboxes as every client does, through the service.
"""
