"""Puts the web tools together: a machine, the bridge that it reaches the web through, and what callers ask for."""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mcp_sandbox.config import ConfigError, WebSettings
from mcp_sandbox.web.searching import providers_of
from mcp_sandbox.web.web import Web
from websearch import dial
from websearch.access import Access
from websearch.bridge import Bridge
from websearch.policy import Surroundings
from websearch.providers import secrets_of, services_of
from websearch.quotas import Ledger
from websearch.singleton import Limits, MachineSource, Singleton

MAX_TEXT_BYTES = 24 << 20  # of the text of a page: five million characters, of up to four bytes


@asynccontextmanager
async def open_web(
    settings: WebSettings,
    source: MachineSource,
    surroundings: Callable[[], Surroundings],
    on_access: Callable[[Access], None] = Access.write_log,
    resolver: dial.Resolver = dial.resolve,
) -> AsyncIterator[Web]:
    """Open the web for callers. No machine is started before it is needed."""
    policy, ledger = settings.policy(), Ledger(settings.quotas())
    providers = providers_of(settings)
    secrets = secrets_of(providers)
    tls = _tls(settings.certificates()) if secrets else None
    # A page that takes over the process that reads it can use neither the keys nor the operator's own search engine.
    for_searches = policy.model_copy(update={"services": services_of(providers)})

    def open_bridge(kind: str) -> Bridge:  # for each connection, because the addresses of this host may change
        searches = kind == "search"
        return Bridge(
            for_searches if searches else policy,
            ledger,
            surroundings=surroundings(),
            secrets=secrets if searches else None,
            resolver=resolver,
            tls=tls,
            on_access=on_access,
        )

    async with Singleton(source, open_bridge, _limits(settings)) as jobs:
        yield Web(jobs, settings, providers)


def _tls(certificates: str | None) -> ssl.SSLContext:
    """Return how the bridge checks the servers that get a key. To read all authorities takes long: it is done once."""
    context = ssl.create_default_context()
    try:
        if certificates is not None:
            context.load_verify_locations(cadata=certificates)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"web.ca_file has no certificates: {error}") from error
    return context


def _limits(settings: WebSettings) -> Limits:
    return Limits(
        idle_s=settings.idle_s,
        max_requests=settings.max_requests,
        max_age_s=settings.max_age_s,
        max_answer_bytes=settings.max_bytes + MAX_TEXT_BYTES,
    )
