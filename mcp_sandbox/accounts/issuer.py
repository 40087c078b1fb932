"""Access tokens of an OAuth issuer: signed claims (JWT) about a user, made for this server."""

import logging
from typing import Any

import jwt

from mcp_sandbox.accounts.issuer_keys import ALGORITHMS, IssuerKeys
from mcp_sandbox.accounts.tokens import SCOPES, Token
from mcp_sandbox.config import OAuthSettings

CLAIMS = ("iss", "aud", "exp", "sub")  # that every token must have
TYPES = ("jwt", "at+jwt", "application/at+jwt")  # RFC 9068; many issuers still say JWT
MAX_TOKEN_CHARS = 16_384
MAX_SUBJECT_CHARS = 255

logger = logging.getLogger(__name__)


class Issuer:
    """Verifies the tokens of one issuer. It keeps none of them."""

    def __init__(self, settings: OAuthSettings) -> None:
        assert settings.issuer is not None
        self._settings = settings
        self._name = settings.issuer
        self._keys = IssuerKeys(settings.issuer, settings.jwks_url)

    async def find(self, secret: str) -> Token | None:
        """Return the account of a token that is valid now and made for this server."""
        try:
            claims = await self._claims(secret)
        except (jwt.PyJWTError, RecursionError) as error:  # its text may have parts of the token
            logger.info("refused an OAuth token: %s", type(error).__name__)
            return None
        owner = f"{self._name}|{claims['sub']}"
        granted = _granted(claims)
        return Token(owner, owner, tuple(scope for scope in SCOPES if self._settings.scope_prefix + scope in granted))

    async def _claims(self, secret: str) -> dict[str, Any]:
        if len(secret) > MAX_TOKEN_CHARS or not secret.isascii():
            raise jwt.InvalidTokenError
        head = jwt.get_unverified_header(secret)
        if str(head.get("typ", "JWT")).lower() not in TYPES:
            raise jwt.InvalidTokenError  # such as a token about a login, which is for another party
        key = await self._keys.find(head.get("kid"), head.get("alg"))
        settings = self._settings
        claims: dict[str, Any] = jwt.decode(
            secret,
            key,
            algorithms=ALGORITHMS,
            issuer=self._name,
            audience=settings.audience or settings.resource,
            leeway=settings.leeway_s,
            options={"require": list(CLAIMS)},
        )
        if not (0 < len(claims["sub"]) <= MAX_SUBJECT_CHARS and claims["sub"].isprintable()):
            raise jwt.InvalidTokenError
        return claims


def _granted(claims: dict[str, Any]) -> list[str]:
    """Return the scopes of a token: a text (RFC 8693), or a list, as some issuers have it."""
    found = claims.get("scope", claims.get("scp"))
    if isinstance(found, str):
        return found.split()
    return [str(scope) for scope in found] if isinstance(found, list) else []
