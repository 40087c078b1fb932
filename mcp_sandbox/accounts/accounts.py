"""Who may use a shared server: holders of its own tokens, and users of an OAuth issuer."""

from typing import TYPE_CHECKING

from mcp_sandbox.accounts.tokens import PREFIX, Token, Tokens
from mcp_sandbox.config import OAuthSettings

if TYPE_CHECKING:
    from mcp_sandbox.accounts.issuer import Issuer


class Accounts:
    """Finds the account of a secret. It looks at the registry every time, so a revoked token ends at once."""

    def __init__(self, tokens: Tokens, oauth: OAuthSettings) -> None:
        self._tokens = tokens
        self._issuer = _issuer(oauth) if oauth.issuer is not None else None

    def exist(self) -> bool:
        """Return whether anybody can have an account."""
        return self._issuer is not None or bool(self._tokens.all())

    async def find(self, secret: str) -> Token | None:
        """Return the account of a valid token."""
        if self._issuer is None or secret.startswith(PREFIX):
            return self._tokens.find(secret)
        return await self._issuer.find(secret)


def _issuer(oauth: OAuthSettings) -> "Issuer":
    from mcp_sandbox.accounts.issuer import Issuer  # the library for signatures takes a while to load

    return Issuer(oauth)
