"""Accounts over HTTP, on machines in memory: scopes, quotas, rates, revoked tokens, and users of an OAuth issuer."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client import Client, ClientExtension
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from mcp_sandbox.accounts.accounts import Accounts
from mcp_sandbox.accounts.audit import FILE, open_audit
from mcp_sandbox.accounts.tokens import Token, Tokens
from mcp_sandbox.config import OAuthSettings, Settings
from mcp_sandbox.sandboxes.admission import Quota
from tests.functional.http_fake import finding, serving_fakes
from tests.functional.mcp_client import data_of, error_of
from tests.oauth_issuer import RESOURCE, FakeIssuer, serving_issuer
from tests.unit.fakes import FakeProvider
from tests.unit.task_client import ERA, Tasks, ask, start, state
from tests.waiting import HANG_S

ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
METADATA = "/.well-known/oauth-protected-resource"


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    with anyio.fail_after(HANG_S):
        yield


@asynccontextmanager
async def connected(
    address: str, secret: str, mode: str = "2026-07-28", *extensions: ClientExtension
) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=HANG_S) as http,
        Client(streamable_http_client(address, http_client=http), mode=mode, extensions=extensions) as client,
    ):
        yield client


def rest_of(address: str, secret: str | None = None) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    return httpx2.AsyncClient(base_url=address.removesuffix("/mcp"), headers=headers, timeout=HANG_S)


@ERAS
async def test_a_token_that_may_only_read_sees_its_owners_sandboxes_and_changes_nothing(mode: str):
    find = finding({"writer": Token("ana", "ana"), "reader": Token("dashboard", "ana", ("read",))})
    provider = FakeProvider()
    async with (
        serving_fakes(provider, find_token=find) as address,
        connected(address, "writer", mode) as writer,
        connected(address, "reader", mode) as reader,
    ):
        sandbox_id = (await data_of(writer, "create_sandbox"))["sandbox_id"]
        assert [box["sandbox_id"] for box in (await data_of(reader, "list_sandboxes"))["sandboxes"]] == [sandbox_id]
        offered = {tool.name for tool in (await reader.list_tools()).tools}
        assert "list_files" in offered
        assert not offered & {"create_sandbox", "run_code", "write_file"}
        for tool, arguments in (("create_sandbox", {}), ("run_code", {"code": "1"}), ("close_sandbox", {})):
            told = error_of(await reader.call_tool(tool, {"sandbox_id": sandbox_id, **arguments}))
            assert told.startswith("This token may only read.")
        assert {tool.name for tool in (await writer.list_tools()).tools} > offered
        assert provider.alive == 1


async def test_a_token_that_may_only_read_follows_a_task_and_cannot_cancel_it():
    find = finding({"writer": Token("ana", "ana"), "reader": Token("dashboard", "ana", ("read",))})
    provider = FakeProvider()
    async with (
        serving_fakes(provider, find_token=find) as address,
        connected(address, "writer", ERA, Tasks()) as writer,
        connected(address, "reader", ERA, Tasks()) as reader,
    ):
        task = await start(writer, "run_code", code="forever", background=True)
        with pytest.raises(MCPError, match="may only read"):
            await ask(reader, "tasks/cancel", task.task_id)
        assert (await state(reader, task))["status"] == "working"
        await ask(writer, "tasks/cancel", task.task_id)
        assert (await state(reader, task))["status"] == "cancelled"


async def test_a_quota_of_a_token_holds_for_all_faces_and_for_this_token_only():
    small = Token("ana", "ana", quota=Quota(sandboxes=1))
    find = finding({"small": small, "large": Token("bob", "bob")})
    async with (
        serving_fakes(FakeProvider(), find_token=find) as address,
        connected(address, "small") as client,
        rest_of(address, "small") as rest,
        rest_of(address, "large") as others,
    ):
        await data_of(client, "create_sandbox")
        assert "quota.sandboxes = 1" in error_of(await client.call_tool("create_sandbox", {}))
        refused = await rest.post("/api/v1/sandboxes")
        assert (refused.status_code, refused.json()["fields"]["setting"]) == (429, "quota.sandboxes")
        for _ in range(2):
            assert (await others.post("/api/v1/sandboxes")).status_code == 201


async def test_a_quota_of_active_runs_holds():
    provider = FakeProvider()
    find = finding({"small": Token("ana", "ana", quota=Quota(runs=1))})
    async with serving_fakes(provider, find_token=find) as address, connected(address, "small") as client:
        one, two = [(await data_of(client, "create_sandbox"))["sandbox_id"] for _ in range(2)]
        await client.call_tool("run_code", {"sandbox_id": one, "code": "forever", "background": True})
        told = error_of(await client.call_tool("run_code", {"sandbox_id": two, "code": "1"}))
        assert "quota.runs = 1" in told


async def test_a_token_with_too_many_requests_is_told_in_words():
    limit = 5
    find = finding({"slow": Token("ana", "ana", requests_per_minute=limit)})

    async def call_too_often() -> None:
        for _ in range(limit + 1):
            await client.call_tool("list_sandboxes", {})

    async with serving_fakes(FakeProvider(), find_token=find) as address, rest_of(address, "slow") as rest:
        async with connected(address, "slow") as client:
            with pytest.raises(MCPError, match="Too many requests with this token"):
                await call_too_often()
        refused = await rest.get("/api/v1/sandboxes")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0


async def test_a_revoked_token_ends_in_the_middle_of_a_session(tmp_path: Path):
    with closing(Tokens(tmp_path)) as tokens, closing(Tokens(tmp_path)) as operator:  # the latter: another process
        accounts = Accounts(tokens, OAuthSettings())
        secret = operator.create("ana")
        async with serving_fakes(FakeProvider(), find_token=accounts.find) as address, rest_of(address, secret) as rest:
            async with connected(address, secret, "legacy") as client:
                await data_of(client, "list_sandboxes")
                operator.revoke("ana")
                with pytest.raises(MCPError, match="Send a valid token"):
                    await client.call_tool("list_sandboxes", {})
            assert (await rest.get("/api/v1/sandboxes")).status_code == 401


# -- OAuth -------------------------------------------------------------------------------------------------


@pytest.fixture
def issuer() -> Iterator[FakeIssuer]:
    with serving_issuer() as issuer:
        yield issuer


@asynccontextmanager
async def serving_users_of(issuer: FakeIssuer, home: Path, **oauth: Any) -> AsyncIterator[tuple[str, Tokens]]:
    settings = Settings(serve={"port": 0}, oauth={"issuer": issuer.url, "resource": RESOURCE, **oauth})
    with closing(Tokens(home)) as tokens:
        find = Accounts(tokens, settings.oauth).find
        async with serving_fakes(FakeProvider(), find_token=find, settings=settings) as address:
            yield address, tokens


async def test_a_client_without_a_token_learns_who_issues_them(issuer: FakeIssuer, tmp_path: Path):
    async with serving_users_of(issuer, tmp_path, scope_prefix="sandbox:") as (address, _), rest_of(address) as http:
        refused = await http.post("/mcp")
        assert refused.status_code == 401
        told = refused.headers["WWW-Authenticate"]
        assert told == f'Bearer resource_metadata="https://box.test{METADATA}/mcp"'
        for path in (METADATA, f"{METADATA}/mcp"):
            document = (await http.get(path)).json()
            assert document["resource"] == RESOURCE
            assert document["authorization_servers"] == [issuer.url]
            assert document["scopes_supported"] == ["sandbox:read", "sandbox:use", "sandbox:operate"]


async def test_without_an_issuer_there_are_no_metadata():
    async with serving_fakes(FakeProvider(), find_token=finding({})) as address, rest_of(address) as http:
        assert (await http.get(METADATA)).status_code == 404


@ERAS
async def test_users_of_an_issuer_have_their_own_sandboxes(mode: str, issuer: FakeIssuer, tmp_path: Path):
    async with (
        serving_users_of(issuer, tmp_path) as (address, tokens),
        connected(address, issuer.token("ana"), mode) as hers,
        connected(address, issuer.token("bob"), mode) as his,
        connected(address, tokens.create("ana"), mode) as own,
    ):
        sandbox_id = (await data_of(hers, "create_sandbox"))["sandbox_id"]
        for other in (his, own):
            assert (await data_of(other, "list_sandboxes"))["sandboxes"] == []
        async with connected(address, issuer.token("ana"), mode) as again:  # another token of the same user
            assert [box["sandbox_id"] for box in (await data_of(again, "list_sandboxes"))["sandboxes"]] == [sandbox_id]


async def test_a_token_of_the_issuer_without_a_scope_is_told_which_it_needs(issuer: FakeIssuer, tmp_path: Path):
    async with (
        serving_users_of(issuer, tmp_path) as (address, _),
        rest_of(address, issuer.token(scope="openid")) as rest,
        rest_of(address, issuer.token(exp=1)) as late,
    ):
        refused = await rest.get("/api/v1/sandboxes")
        assert refused.status_code == 403
        assert 'error="insufficient_scope", scope="use"' in refused.headers["WWW-Authenticate"]
        expired = await late.get("/api/v1/sandboxes")
        assert expired.status_code == 401
        assert 'error="invalid_token"' in expired.headers["WWW-Authenticate"]


# -- audit log ---------------------------------------------------------------------------------------------


async def test_the_audit_log_says_who_did_what_and_nothing_more(tmp_path: Path):
    find = finding({"secret-1": Token("laptop", "ana"), "secret-2": Token("dashboard", "ana", ("read",))})
    settings = Settings(serve={"port": 0, "trusted_proxies": ("127.0.0.1",)})
    forwarded = {"X-Forwarded-For": "203.0.113.7"}
    with open_audit(tmp_path, "file"):
        async with (
            serving_fakes(FakeProvider(), find_token=find, settings=settings) as address,
            connected(address, "secret-1", "legacy") as client,
            rest_of(address, "secret-1") as rest,
            rest_of(address, "secret-2") as reader,
            rest_of(address, "secret-3") as stranger,
        ):
            box = (await data_of(client, "create_sandbox"))["sandbox_id"]
            await client.call_tool("run_code", {"sandbox_id": box, "code": "print('code')"})
            await client.call_tool("read_file", {"sandbox_id": box, "path": "/workspace/path"})
            await client.call_tool("run_code", {"sandbox_id": "sb-0", "code": "print('code')"})
            await client.call_tool("no_such_tool", {})
            made = (await rest.post("/api/v1/sandboxes", headers=forwarded)).json()["sandbox_id"]
            await rest.put(f"/api/v1/sandboxes/{made}/files/content?path=path", content=b"content")
            await reader.delete(f"/api/v1/sandboxes/{made}")
            await reader.get("/metrics")
            await stranger.get("/api/v1/sandboxes")
    text = (tmp_path / "logs" / FILE).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["token"], line["face"], line["action"], line["sandbox"], line["outcome"]) for line in lines] == [
        ("laptop", "mcp", "create_sandbox", box, "ok"),
        ("laptop", "mcp", "run_code", box, "ok"),
        ("laptop", "mcp", "read_file", box, "file_not_found"),
        ("laptop", "mcp", "run_code", "sb-0", "sandbox_not_found"),
        ("laptop", "mcp", "unknown tool", None, "bad_request"),
        ("laptop", "rest", "create_sandbox", made, "ok"),
        ("laptop", "rest", "write_file", made, "ok"),
        ("dashboard", "rest", "close_sandbox", made, "token_read_only"),
        ("dashboard", "http", "GET", None, "insufficient_scope"),
    ]
    assert {line["owner"] for line in lines} == {"ana"}
    assert lines[1]["run"] is not None
    assert [line["client"] for line in lines if line["face"] == "rest"] == ["203.0.113.7", "127.0.0.1", "127.0.0.1"]
    assert not any(secret in text for secret in ("print", "content", "path", "secret-"))


async def test_no_client_can_pretend_to_be_at_another_address(tmp_path: Path):
    with open_audit(tmp_path, "file"):
        async with serving_fakes(FakeProvider()) as address, rest_of(address) as rest:
            await rest.get("/api/v1/sandboxes", headers={"X-Forwarded-For": "203.0.113.7"})
    assert json.loads((tmp_path / "logs" / FILE).read_text())["client"] == "127.0.0.1"
