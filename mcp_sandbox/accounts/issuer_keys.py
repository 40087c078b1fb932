"""The public keys of an OAuth issuer (JWKS), fetched from the issuer and from nowhere else."""

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
import jwt

# Signatures with a public key only: with HS… whoever can verify a token can also make one.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEY_TYPES = ("RSA", "EC", "OKP")
FRESH_S = 3600.0  # after which keys are fetched again, so that a withdrawn one does not stay
STALE_S = 24 * 3600.0  # for which old keys serve if the issuer cannot be reached
ASK_EVERY_S = 30.0  # at most: a token can name any key
FETCH_S = 5.0
MAX_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class IssuerKeys:
    """The keys of one issuer. A token that names an unknown key makes it look for new ones, but not often."""

    def __init__(self, issuer: str, jwks_url: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._jwks_url = jwks_url  # None: as the issuer's metadata say
        self._clock = clock
        self._keys: list[dict[str, Any]] = []
        self._fetched = -math.inf
        self._asked = -math.inf
        self._turn = anyio.Lock()

    async def find(self, kid: object, algorithm: object) -> jwt.PyJWK:
        """Return the key that a token names.

        Raises:
            jwt.PyJWTError: there is none, or it is not for this algorithm.
        """
        if algorithm not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError
        old = self._clock() - self._fetched > FRESH_S
        if not self._named(kid) or (old and not self._turn.locked()):  # nobody waits for keys that still hold
            await self._refresh()
        named = self._named(kid)
        if len(named) != 1 or named[0].get("alg", algorithm) != algorithm:
            raise jwt.InvalidKeyError
        return jwt.PyJWK(named[0], str(algorithm))

    def _named(self, kid: object) -> list[dict[str, Any]]:
        """Return the keys that a token may mean: one that names none means the only one there is."""
        if self._clock() - self._fetched > STALE_S:
            return []
        return [key for key in self._keys if kid is None or key.get("kid") == kid]

    async def _refresh(self) -> None:
        async with self._turn:
            if self._clock() - self._asked < ASK_EVERY_S:
                return
            self._asked = self._clock()
            try:
                self._keys = await fetch_keys(self._issuer, self._jwks_url)
                self._fetched = self._clock()
            except (httpx2.HTTPError, TimeoutError, RecursionError, ValueError) as error:
                logger.warning("cannot fetch the keys of the OAuth issuer: %s", error)


async def fetch_keys(issuer: str, jwks_url: str | None) -> list[dict[str, Any]]:
    """Return the issuer's keys for signatures.

    Raises:
        httpx2.HTTPError, ValueError: the issuer does not say.
    """
    async with httpx2.AsyncClient(timeout=FETCH_S, follow_redirects=False) as client:
        with anyio.fail_after(2 * FETCH_S):
            document = await _fetch(client, jwks_url or await _discover(client, issuer))
    match document:
        case {"keys": [*keys]}:
            return [key for key in keys if isinstance(key, dict) and _verifies(key)]
    raise ValueError("its keys are not a JSON Web Key Set")


def _verifies(key: dict[str, Any]) -> bool:
    return key.get("kty") in KEY_TYPES and key.get("use", "sig") == "sig"


async def _discover(client: httpx2.AsyncClient, issuer: str) -> str:
    """Return where the keys are, from the issuer's metadata (OpenID Connect Discovery or RFC 8414)."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    places = (
        f"{origin}{path}/.well-known/openid-configuration",
        f"{origin}/.well-known/oauth-authorization-server{path}",
    )
    for place in places:
        try:
            found = await _fetch(client, place)
        except httpx2.HTTPStatusError:
            continue
        if found.get("issuer") != issuer:
            raise ValueError("its metadata name another issuer")
        url = str(found.get("jwks_uri", ""))
        if urlsplit(url)[:2] != parts[:2]:
            raise ValueError("its metadata name keys on another host; set oauth.jwks_url if they belong to it")
        return url
    raise ValueError("it has no metadata; set oauth.jwks_url")


async def _fetch(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    async with client.stream("GET", url, headers={"Accept": "application/json"}) as response:
        if response.status_code != httpx2.codes.OK:  # a redirect, too: it may lead elsewhere
            raise httpx2.HTTPStatusError(
                f"{url} answers {response.status_code}", request=response.request, response=response
            )
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > MAX_BYTES:
                raise ValueError(f"{url} answers with more than {MAX_BYTES:,} bytes")
    match json.loads(data):
        case dict(document):
            return document
    raise ValueError(f"{url} does not answer with a JSON object")
