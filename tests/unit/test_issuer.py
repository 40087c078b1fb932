"""Tokens of an OAuth issuer: which ones open the server, and where its keys come from."""

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import ValidationError

from mcp_sandbox.accounts import issuer_keys
from mcp_sandbox.accounts.issuer import Issuer
from mcp_sandbox.accounts.issuer_keys import ASK_EVERY_S, FRESH_S, STALE_S, IssuerKeys
from mcp_sandbox.config import OAuthSettings
from tests.oauth_issuer import RESOURCE, FakeIssuer, serving_issuer

HOUR_S = 3600


@pytest.fixture
def fake() -> Iterator[FakeIssuer]:
    with serving_issuer() as issuer:
        yield issuer


def verifier(fake: FakeIssuer, **settings: Any) -> Issuer:
    return Issuer(OAuthSettings(issuer=fake.url, resource=RESOURCE, **settings))


async def test_a_user_of_the_issuer_is_an_owner(fake: FakeIssuer):
    found = await verifier(fake).find(fake.token("ana", scope="openid use operate"))
    assert found is not None
    assert (found.owner, found.scopes) == (f"{fake.url}|ana", ("use", "operate"))


@pytest.mark.parametrize("claims", [{"scope": None}, {"scope": "openid"}, {"scope": None, "scp": {"use": 1}}])
async def test_a_token_without_our_scopes_may_do_nothing(fake: FakeIssuer, claims: dict[str, Any]):
    found = await verifier(fake).find(fake.token(**claims))
    assert found is not None
    assert found.scopes == ()


async def test_scopes_may_be_a_list_and_have_a_prefix(fake: FakeIssuer):
    token = fake.token(scope=None, scp=["sandbox:read", "use"])
    found = await verifier(fake, scope_prefix="sandbox:").find(token)
    assert found is not None
    assert found.scopes == ("read",)


async def test_another_audience_than_the_resource_can_be_set(fake: FakeIssuer):
    issuer = verifier(fake, audience="sandboxes")
    assert await issuer.find(fake.token(aud=["other", "sandboxes"])) is not None
    assert await issuer.find(fake.token()) is None


NOW = int(time.time())
WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "expired": {"exp": NOW - HOUR_S},
    "never expires": {"exp": None},
    "not valid yet": {"nbf": NOW + HOUR_S},
    "for another server": {"aud": "https://other.test/mcp"},
    "for nobody": {"aud": None},
    "of another issuer": {"iss": "https://evil.test"},
    "of no issuer": {"iss": None},
    "about nobody": {"sub": None},
    "about a number": {"sub": 7},
    "about an empty name": {"sub": ""},
    "with a name that spoils logs": {"sub": "a\nb"},
}


@pytest.mark.parametrize("claims", WRONG_CLAIMS.values(), ids=WRONG_CLAIMS)
async def test_a_token_with_wrong_claims_is_refused(fake: FakeIssuer, claims: dict[str, Any]):
    assert await verifier(fake).find(fake.token(**claims)) is None


@pytest.mark.parametrize("head", [{"typ": "id+jwt"}, {"alg": "none"}, {"crit": ["x"]}, {"kid": "unknown"}], ids=str)
async def test_a_token_with_a_wrong_head_is_refused(fake: FakeIssuer, head: dict[str, str]):
    assert await verifier(fake).find(with_head(fake.token(), head)) is None


def with_head(token: str, changes: dict[str, str]) -> str:
    head = jwt.get_unverified_header(token) | changes
    encoded = base64.urlsafe_b64encode(json.dumps(head).encode()).rstrip(b"=").decode()
    return ".".join([encoded, *token.split(".")[1:]])


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "mcps_secret", "\udcff", "é.é.é", "x" * 100_000, "." * 1000])
async def test_what_is_no_token_is_refused(fake: FakeIssuer, text: str):
    assert await verifier(fake).find(text) is None


async def test_a_deeply_nested_head_is_refused(fake: FakeIssuer):
    head = base64.urlsafe_b64encode(b"[" * 9000).decode()
    assert await verifier(fake).find(f"{head}.e30.x") is None


async def test_a_token_signed_with_another_key_is_refused(fake: FakeIssuer):
    token = fake.token()
    fake.new_key("first")
    assert await verifier(fake).find(token) is None


async def test_a_token_signed_with_a_public_key_as_a_password_is_refused(fake: FakeIssuer):
    secret = base64.urlsafe_b64encode(b"shared" * 8).decode()
    fake.documents["/keys"] = {"keys": [{"kty": "oct", "k": secret, "kid": "first", "alg": "HS256"}]}
    claims = {"iss": fake.url, "sub": "ana", "aud": RESOURCE, "exp": time.time() + 60, "scope": "use"}
    forged = jwt.encode(claims, b"shared" * 8, "HS256", {"kid": "first"})
    assert await verifier(fake).find(forged) is None


async def test_a_key_without_an_algorithm_serves_those_of_its_kind(fake: FakeIssuer):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    fake.documents["/keys"] = {"keys": [public]}
    claims = {"iss": fake.url, "sub": "ana", "aud": RESOURCE, "exp": time.time() + 60, "scope": "use"}
    assert await verifier(fake).find(jwt.encode(claims, key, "PS256")) is not None


# -- keys --------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_new_key_is_found_and_unknown_ones_do_not_make_many_requests(fake: FakeIssuer):
    clock = Clock()
    keys = IssuerKeys(fake.url, f"{fake.url}/keys", clock)
    await keys.find("first", "ES256")
    fake.new_key("second")
    for _ in range(10):
        with pytest.raises(jwt.PyJWTError):
            await keys.find("second", "ES256")
    assert fake.asked == ["/keys"]
    clock.now += ASK_EVERY_S
    assert (await keys.find("second", "ES256")).key_id == "second"
    assert fake.asked == ["/keys", "/keys"]


async def test_a_withdrawn_key_does_not_stay(fake: FakeIssuer):
    clock = Clock()
    keys = IssuerKeys(fake.url, None, clock)
    await keys.find("first", "ES256")
    del fake.keys["first"]
    clock.now += FRESH_S + 1
    with pytest.raises(jwt.PyJWTError):
        await keys.find("first", "ES256")


async def test_keys_serve_for_a_day_while_the_issuer_is_away(fake: FakeIssuer, caplog: pytest.LogCaptureFixture):
    clock = Clock()
    keys = IssuerKeys(fake.url, None, clock)
    await keys.find("first", "ES256")
    fake.documents["/keys"] = None
    clock.now = STALE_S
    assert (await keys.find("first", "ES256")).key_id == "first"
    assert "cannot fetch the keys of the OAuth issuer" in caplog.text
    clock.now += ASK_EVERY_S
    with pytest.raises(jwt.PyJWTError):
        await keys.find("first", "ES256")


async def test_metadata_of_an_authorization_server_do_as_well(fake: FakeIssuer):
    fake.documents["/.well-known/openid-configuration"] = None
    fake.documents["/.well-known/oauth-authorization-server"] = {"issuer": fake.url, "jwks_uri": f"{fake.url}/keys"}
    assert len(await issuer_keys.fetch_keys(fake.url, None)) == 1


@pytest.mark.parametrize("elsewhere", ["http://127.0.0.1:9/keys", "https://evil.test/keys", "file:///etc/passwd", ""])
async def test_keys_come_from_the_issuer_only(fake: FakeIssuer, elsewhere: str):
    fake.documents["/.well-known/openid-configuration"] = {"issuer": fake.url, "jwks_uri": elsewhere}
    with pytest.raises(ValueError, match=r"oauth\.jwks_url"):
        await issuer_keys.fetch_keys(fake.url, None)


async def test_no_redirect_is_followed(fake: FakeIssuer):
    fake.documents["/keys"] = f"{fake.url}/elsewhere"
    with pytest.raises(httpx2.HTTPStatusError, match="302"):
        await issuer_keys.fetch_keys(fake.url, None)
    assert "/elsewhere" not in fake.asked


@pytest.mark.parametrize(
    "document", [[], {}, {"keys": {}}, {"keys": "x" * (1 << 20)}], ids=["list", "empty", "no list", "large"]
)
async def test_what_are_no_keys_is_refused(fake: FakeIssuer, document: Any):
    fake.documents["/keys"] = document
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        await issuer_keys.fetch_keys(fake.url, None)


async def test_metadata_of_another_issuer_are_refused(fake: FakeIssuer):
    fake.documents["/.well-known/openid-configuration"] = {"issuer": "https://evil.test", "jwks_uri": fake.url}
    with pytest.raises(ValueError, match="another issuer"):
        await issuer_keys.fetch_keys(fake.url, None)


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"issuer": "https://login.test"}, "belong together"),
        ({"issuer": "http://login.test", "resource": RESOURCE}, "https"),
        ({"issuer": "https://me:secret@login.test", "resource": RESOURCE}, "like https"),
        ({"issuer": "https://login.test", "resource": "box.test"}, "like https"),
        ({"issuer": "https://login.test", "resource": RESOURCE, "jwks_url": "file:///keys"}, "like https"),
    ],
)
def test_an_issuer_that_cannot_be_trusted_is_refused(settings: dict[str, str], problem: str):
    with pytest.raises(ValidationError, match=problem):
        OAuthSettings(**settings)
