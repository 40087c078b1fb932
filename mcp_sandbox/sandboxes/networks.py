"""What each sandbox may reach: the mode it gets, and the bridge that carries the streams of its machine."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio.abc import ByteStream

from guest.client.streams import ServeStream
from guest.client.wire import one_line
from mcp_sandbox.config import EVERY_DOMAIN, Settings
from mcp_sandbox.errors import BadRequest, DomainNotAllowed, NetworkNotEnabled, NetworkNotInTemplate
from templates.model import Template
from vmm.types import NetworkMode
from websearch import dial
from websearch.access import Access, Caller
from websearch.bridge import Bridge
from websearch.policy import Verdict, canonical_pattern, within
from websearch.quotas import Ledger
from websearch.surroundings import surroundings

FRESH_S = 10.0  # for the addresses of this host, which can change
MAX_REFUSALS = 20  # that a sandbox remembers
MAX_REFUSAL_CHARS = 400
MODES = list(NetworkMode)  # each allows more than the one before
ADVICE = {
    "domain-not-allowed": "the operator's setting network.allow_domains decides",
    "domain-denied": "the operator's setting network.deny_domains decides",
    "domain-not-requested": "create a sandbox whose allow_domains include it",
    "port": "the operator's setting network.ports decides",
}

OnAccess = Callable[[Access], None]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a sandbox was granted."""

    mode: NetworkMode = NetworkMode.NONE
    domains: tuple[str, ...] = ()  # that it may reach; only in mode `proxy`
    only: tuple[str, ...] | None = None  # the domains that it asked for; None: all that the operator allows


OFFLINE = Grant()


class Networks:
    """Grants networks within what the operator and the template allow. All sandboxes of an owner share its quotas."""

    def __init__(
        self, settings: Settings, on_access: OnAccess = Access.write_log, resolver: dial.Resolver = dial.resolve
    ) -> None:
        self._settings = settings.network
        self._allow_nat = settings.allow_nat
        self._on_access = on_access
        self._resolver = resolver
        self._ledger = Ledger(settings.network.quotas())

    def grant(self, template: Template, mode: NetworkMode, domains: Sequence[str] | None = None) -> Grant:
        """Decide what a sandbox of `template` gets that asks for a mode, and for some domains only.

        Raises:
            BadRequest, NetworkRefused: it gets nothing.
        """
        if domains is not None and mode is not NetworkMode.PROXY:
            raise BadRequest('allow_domains needs network="proxy": no other network mode looks at domains.')
        if mode is NetworkMode.NONE:
            return OFFLINE
        if mode is NetworkMode.NAT and not self._allow_nat:
            raise NetworkNotEnabled(mode, "allow_nat")
        if mode is NetworkMode.PROXY and not self._settings.enabled:
            raise NetworkNotEnabled(mode, "network.allow_domains")
        if MODES.index(mode) > MODES.index(template.network):
            raise NetworkNotInTemplate(template.name, mode, template.network)
        if mode is NetworkMode.NAT:
            return Grant(mode)
        only = None if domains is None else tuple(map(self._checked, domains))
        return Grant(mode, self._settings.allow_domains if only is None else only, only)

    def open(self, grant: Grant, owner: str, sandbox_id: str) -> "Network":
        """Return the network of one sandbox."""
        return Network(grant, Caller(owner, sandbox_id), self)

    def bridge(self, grant: Grant, on_access: OnAccess) -> Bridge:
        """Return a bridge for what was granted. It knows the addresses that this host has now."""

        def ended(access: Access) -> None:
            self._on_access(access)
            on_access(access)

        return Bridge(
            self._settings.policy(grant.only),
            self._ledger,
            surroundings=surroundings(),
            resolver=self._resolver,
            on_access=ended,
            advice=ADVICE,
        )

    def _checked(self, domain: str) -> str:
        try:
            pattern = canonical_pattern(domain)
        except ValueError as error:
            raise BadRequest(f"allow_domains: {error}.") from error
        allowed = self._settings.allow_domains
        if EVERY_DOMAIN not in allowed and not within(pattern, allowed):
            raise DomainNotAllowed(domain, list(allowed))
        return pattern


class Network:
    """The network of one sandbox, and what it was refused lately."""

    def __init__(self, grant: Grant, caller: Caller, networks: Networks) -> None:
        self.grant = grant
        self.sandbox_id = caller.sandbox
        self.closed_connections = 0  # by the last fork or pause
        self._caller = caller
        self._networks = networks
        self._refusals: deque[str] = deque(maxlen=MAX_REFUSALS)
        self.refused = 0  # how often
        self._bridge: Bridge | None = None
        self._bridge_made = 0.0

    @property
    def serve_stream(self) -> ServeStream | None:
        """What serves the streams of the sandbox's machine, if it may open any."""
        return self._serve if self.grant.mode is NetworkMode.PROXY else None

    def refusals_since(self, refused: int) -> tuple[str, ...]:
        """Return what was refused after the first `refused` refusals, each once."""
        new = min(self.refused - refused, len(self._refusals))
        return tuple(dict.fromkeys(list(self._refusals)[len(self._refusals) - new :]))

    async def _serve(self, stream: ByteStream) -> None:
        now = time.monotonic()
        if self._bridge is None or now - self._bridge_made > FRESH_S:
            self._bridge, self._bridge_made = self._networks.bridge(self.grant, self._note), now
        await self._bridge.serve(stream, self._caller)

    def _note(self, access: Access) -> None:
        if not access.verdict.allowed:
            self.refused += 1
            self._refusals.append(_described(access.target, access.verdict))


def _described(target: str, verdict: Verdict) -> str:
    advice = f"; {ADVICE[verdict.rule]}" if verdict.rule in ADVICE else ""
    return one_line(f"{target} ({verdict.rule}): {verdict.reason}{advice}", MAX_REFUSAL_CHARS)
