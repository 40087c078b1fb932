"""A client's stdin and stdout, connected to a shared server.

Clients start this program and wait for it, so it imports little: only Python's standard library, and no MCP SDK.
"""
