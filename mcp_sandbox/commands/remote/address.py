"""Finds the server that a command uses: the one that is named, or the one of this home."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from mcp_sandbox.commands.remote.errors import BadUrl, NoServer
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.control import ControlError, Request, ask, live_servers

ROOT = "/api/v1"
ANSWER_TIMEOUT_S = 5.0  # a server answers at once; one that hangs must not delay the command for long


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the token it is used with."""

    tls: bool
    host: str
    port: int
    prefix: str  # of paths, behind a reverse proxy
    token: str | None

    @classmethod
    def parse(cls, url: str, token: str | None) -> Self:
        """Return the address that a URL names; it may end with /mcp, which is what MCP clients are given.

        Raises:
            BadUrl: it names none, or the token cannot be one.
        """
        wrong = BadUrl(f"{url} is not the address of a server, such as http://127.0.0.1:8000.")
        try:
            parts = urlsplit(url)
            port = parts.port  # looked at only here, and may be no number
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        token = token.strip() if token else None  # files end with a newline
        if token and not (token.isascii() and token.isprintable()):
            raise BadUrl("The token has characters that no token has.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/mcp").removesuffix(ROOT)
        return cls(tls, parts.hostname, port or (443 if tls else 80), prefix, token)

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def find_server(settings: Settings, url: str | None) -> Address:
    """Return the server at `url`, at the `connect` setting, or the newest one of this home.

    Raises:
        BadUrl: that is not the address of a server.
        NoServer: no server of this home serves HTTP.
    """
    named = url or settings.connect
    if named:
        return Address.parse(named, settings.token)
    for server in reversed(live_servers(settings.run_dir)):
        try:
            found = ask(settings.run_dir, server, Request(do="stats"), timeout_s=ANSWER_TIMEOUT_S)["url"]
        except (ControlError, LookupError, TypeError):  # it hangs, or is of an older version
            continue
        if found:
            return Address.parse(found, settings.token)
    raise NoServer
