"""Who asks: whose sandboxes a request may use, and how much of them."""

from dataclasses import dataclass

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken

from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sandboxes.admission import NO_QUOTA, Quota

LOCAL_OWNER = "local"  # of clients without a token: over stdio, or over HTTP on this host


class Caller(AccessToken):
    """A token of ours as the SDK carries it. The SDK binds a session to the token's name."""

    account: Token

    @classmethod
    def of(cls, account: Token) -> "Caller":
        """Return the caller who sent a token. Its secret is needed no more."""
        return cls(token="", client_id=account.name, scopes=list(account.scopes), account=account)


@dataclass(eq=False)
class TokenReadOnly(SandboxError):
    """The caller's token may only read; nothing was done."""

    code = "token_read_only"
    sentence = "This token may only read."


def current_account() -> Token | None:
    """Return the token of the request that this task serves, if it has one."""
    token = get_access_token()
    return token.account if isinstance(token, Caller) else None


def current_owner() -> str:
    """Return the owner of the request that this task serves."""
    account = current_account()
    return LOCAL_OWNER if account is None else account.owner


def current_quota() -> Quota:
    """Return how much the request that this task serves may use."""
    account = current_account()
    return NO_QUOTA if account is None else account.quota


def may_change() -> bool:
    """Return whether the request that this task serves may do more than read."""
    account = current_account()
    return account is None or "use" in account.scopes
