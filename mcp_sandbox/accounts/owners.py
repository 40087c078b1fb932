"""Whose sandboxes a request may use."""

from mcp.server.auth.middleware.auth_context import get_access_token

LOCAL_OWNER = "local"  # of clients without a token: over stdio, or over HTTP on this host


def current_owner() -> str:
    """Return the owner of the request that this task serves: the name of its token, if it has one."""
    token = get_access_token()
    return LOCAL_OWNER if token is None else token.client_id
