"""`mcp-sandbox selftest --compat`: how much of other people's code runs in a sandbox as it does elsewhere.

`material` fetches their code and keeps it in the store. `suites` runs it in sandboxes.
"""
