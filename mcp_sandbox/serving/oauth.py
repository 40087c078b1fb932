"""What an OAuth client learns before it has a token: who issues them for this server (RFC 9728)."""

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mcp_sandbox.accounts.tokens import SCOPES
from mcp_sandbox.config import OAuthSettings
from mcp_sandbox.serving.gate import MCP_PATH, METADATA_PATH


def metadata_url(settings: OAuthSettings) -> str | None:
    """Return where the metadata of this server are; None without an issuer."""
    if settings.resource is None:
        return None
    parts = urlsplit(settings.resource)
    return f"{parts.scheme}://{parts.netloc}{METADATA_PATH}{parts.path.rstrip('/')}"


def metadata_routes(settings: OAuthSettings) -> list[Route]:
    """Return the routes of the metadata: for the whole host, and with the path of the MCP endpoint."""
    url = metadata_url(settings)
    if url is None:
        return []
    document = {
        "resource": settings.resource,
        "authorization_servers": [settings.issuer],
        "scopes_supported": [settings.scope_prefix + scope for scope in SCOPES],
        "bearer_methods_supported": ["header"],
        "resource_name": "mcp-sandbox",
    }

    async def answer(_request: Request) -> Response:
        return JSONResponse(document, headers={"Cache-Control": "public, max-age=3600"})

    return [Route(path, answer) for path in {METADATA_PATH, METADATA_PATH + MCP_PATH, urlsplit(url).path}]
