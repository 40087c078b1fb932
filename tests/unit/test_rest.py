"""The REST face over fake machines: every operation, its errors, and the document that describes them."""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import jsonschema  # type: ignore[import-untyped]
import pytest
from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from starlette.types import ASGIApp, Receive, Scope, Send

from guest.client.messages import FileChunk, Output
from mcp_sandbox.accounts.owners import Caller
from mcp_sandbox.accounts.tokens import Scope as TokenScope
from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import StartFailed
from mcp_sandbox.rest import files, openapi, operations
from mcp_sandbox.rest.app import OPERATIONS
from mcp_sandbox.rest.ranges import Span, wanted
from mcp_sandbox.sandboxes.file_access import CHUNK_BYTES
from tests.unit.fakes import PNG, FakeProvider, finished
from tests.unit.rest_client import Exchange, client_of, rest_over, tools_with
from tests.waiting import HANG_S

MB = 1 << 20


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def app(provider: FakeProvider) -> AsyncIterator[ASGIApp]:
    with anyio.fail_after(HANG_S):
        async with rest_over(
            provider, Settings(toolsets=["advanced"], limits={"sandboxes": 2, "queue_timeout_s": 0})
        ) as app:
            yield app


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def box(client: httpx2.AsyncClient) -> str:
    """The path of a sandbox."""
    answer = await client.post("/sandboxes")
    return f"/sandboxes/{answer.json()['sandbox_id']}"


def problem(answer: httpx2.Response, status: int, code: str | None) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code)
    return body


# -- sandboxes ---------------------------------------------------------------------------------------------


async def test_a_sandbox_has_the_size_that_was_asked_for(client: httpx2.AsyncClient):
    made = await client.post("/sandboxes", json={"memory_mb": 2048, "cpus": 1})
    assert (made.status_code, made.json()["memory_mb"], made.json()["vcpus"]) == (201, 2048, 1)


async def test_a_sandbox_is_created_listed_shown_and_closed(client: httpx2.AsyncClient, provider: FakeProvider):
    created = await client.post("/sandboxes", json={"template": "python-data-analysis", "idle_s": 60})
    assert created.status_code == 201
    path = created.headers["Location"].removeprefix("/api/v1")
    assert (await client.get(path)).json()["sandbox_id"] == created.json()["sandbox_id"]
    assert [box["expires_in_s"] <= 60 for box in (await client.get("/sandboxes")).json()["sandboxes"]] == [True]
    assert (await client.delete(path)).json()["closed"] is True
    assert (await client.delete(path)).json()["closed"] is False
    assert provider.alive == 0
    problem(await client.get(path), 410, "sandbox_closed")


async def test_a_sandbox_is_forked_paused_and_resumed(client: httpx2.AsyncClient, box: str):
    copies = await client.post(f"{box}/fork", json={"count": 1})
    assert copies.status_code == 201
    copy = copies.json()["copies"][0]["sandbox_id"]
    assert (await client.post(f"/sandboxes/{copy}/pause")).json()["state"] == "paused"
    told = problem(await client.post(f"/sandboxes/{copy}/runs", json={"code": "1"}), 409, "sandbox_paused")
    assert told["hint"] == f"POST /api/v1/sandboxes/{copy}/resume first."
    assert (await client.post(f"/sandboxes/{copy}/resume")).json()["state"] == "ready"


async def test_templates_are_listed_without_where_they_are(client: httpx2.AsyncClient):
    listed = (await client.get("/templates")).json()["templates"]
    assert "python-data-analysis" in [template["name"] for template in listed]
    assert all("folder" not in template for template in listed)


def as_owner(app: ASGIApp, name: str, *scopes: TokenScope) -> ASGIApp:
    """The application behind a gate that lets everybody in with one token."""
    account = Token(f"a token of {name}", name, scopes or ("use",))

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        user = AuthenticatedUser(Caller.of(account))
        before = auth_context_var.set(user)
        try:
            await app(scope, receive, send)
        finally:
            auth_context_var.reset(before)

    return gate


REQUESTS_WITH_A_SANDBOX = [operation for operation in OPERATIONS if "{sandbox_id}" in operation.path]
BODIES: dict[str, Any] = {"run": {"code": "1"}}
QUERIES: dict[str, dict[str, str]] = {"read_file": {"path": "a"}, "write_file": {"path": "a"}}


@pytest.mark.parametrize("operation", REQUESTS_WITH_A_SANDBOX, ids=lambda operation: operation.name)
async def test_another_owners_sandbox_answers_like_an_unknown_one(app: ASGIApp, box: str, operation):
    sandbox_id = box.removeprefix("/sandboxes/")
    unknown = sandbox_id[:-4] + "zzzz"

    async def ask(name: str) -> tuple[int, str]:
        path = operation.path.replace("{sandbox_id}", name).replace("{run_id}", "run-1")
        async with client_of(as_owner(app, "bob")) as his:
            answer = await his.request(
                operation.method, path, json=BODIES.get(operation.name), params=QUERIES.get(operation.name)
            )
        return answer.status_code, answer.text.replace(name, "ID")

    assert await ask(sandbox_id) == await ask(unknown)
    assert (await ask(unknown))[0] == 404


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_a_token_that_may_only_read_changes_nothing(app: ASGIApp, box: str, operation, provider: FakeProvider):
    path = operation.path.replace("{sandbox_id}", box.removeprefix("/sandboxes/")).replace("{run_id}", "run-1")
    async with client_of(as_owner(app, "local", "read")) as reader:
        answer = await reader.request(
            operation.method, path, json=BODIES.get(operation.name), params=QUERIES.get(operation.name)
        )
    if operation.method == "GET" or operation.name == "web_search":
        assert answer.status_code != 403
    else:
        problem(answer, 403, "token_read_only")
    assert provider.alive == 1


# -- errors ------------------------------------------------------------------------------------------------


async def test_a_limit_is_a_problem_that_says_what_to_do(client: httpx2.AsyncClient, box: str):
    await client.post("/sandboxes")
    told = problem(await client.post("/sandboxes"), 429, "sandbox_limit_reached")
    assert told["fields"] == {"setting": "limits.sandboxes", "value": 2}
    assert "DELETE /api/v1/sandboxes/ID" in told["hint"]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/sandboxes", {"templat": "x"}, "templat"),
        ("/sandboxes", {"idle_s": "60"}, "idle_s"),
        ("/sandboxes", [], "body"),
        ("/runs", {"kind": "song"}, "kind"),
        ("/runs", {"code": "1", "event": 1}, "event"),
        ("/runs", 1, "body"),
        ("/runs", {"code": "\0"}, "null byte"),
        ("/runs", {"kind": "command", "command": "ls", "env": {"A": 1}}, "env"),
        ("/runs", {"kind": "command", "command": "ls", "env": {f"A{n}": 1 for n in range(1001)}}, "at most 1,000"),
        ("/sandboxes", {f"a{n}": 1 for n in range(101)}, "in 101 places"),
    ],
)
async def test_a_wrong_body_is_refused_with_what_is_wrong(
    client: httpx2.AsyncClient, provider: FakeProvider, path: str, body: object, names: str
):
    assert names in problem(await client.post(path, json=body), 400, "bad_request")["detail"]
    assert provider.agents == []


@pytest.mark.parametrize("body", [{"code": "1"}, {"kind": "command", "command": "ls"}], ids=["code", "command"])
async def test_a_run_may_leave_processes_running(client: httpx2.AsyncClient, box: str, provider: FakeProvider, body):
    assert (await client.post(f"{box}/runs", json={**body, "keep_processes": True})).status_code == 200
    assert provider.agents[-1].requests[-1].keep_processes


async def test_a_wrong_query_is_refused_with_what_is_wrong(client: httpx2.AsyncClient, box: str):
    for query, name in (("offset=x", "offset"), ("ofset=1", "ofset"), ("recursive=perhaps", "recursive")):
        assert name in problem(await client.get(f"{box}/files?{query}"), 400, "bad_request")["detail"]


async def test_a_body_has_to_be_json_and_short(client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    told = problem(await client.post("/runs", content=b'{"code": "1"}'), 400, "bad_request")
    assert "Content-Type: application/json" in told["detail"]
    monkeypatch.setattr(operations, "MAX_JSON_BYTES", 100)
    problem(await client.post("/runs", json={"code": "x" * 100}), 413, "input_too_large")


async def test_an_unknown_path_and_method_are_problems_too(client: httpx2.AsyncClient):
    problem(await client.get("/songs"), 404, None)
    answer = await client.put("/sandboxes")
    problem(answer, 405, None)
    assert {word.strip() for word in answer.headers["Allow"].split(",")} == {"GET", "HEAD", "POST"}
    problem(await client.get(f"/sandboxes/{'x' * 65}"), 400, "bad_request")


async def test_a_read_only_server_changes_nothing(provider: FakeProvider):
    async with rest_over(provider, Settings(read_only=True)) as app, client_of(app) as client:
        problem(await client.post("/sandboxes"), 405, None)
        problem(await client.post("/runs", json={"code": "1"}), 404, None)
        assert (await client.get("/sandboxes")).status_code == 200
    assert provider.agents == []


async def test_a_server_with_few_tools_offers_only_what_they_do(provider: FakeProvider):
    settings = Settings(tools=["run_command", "list_sandboxes"])
    async with rest_over(provider, settings) as app, client_of(app) as client:
        assert (await client.post("/runs", json={"kind": "command", "command": "ls"})).status_code == 200
        told = problem(await client.post("/runs", json={"code": "1"}), 400, "bad_request")
        assert "'code'" in told["detail"]
        problem(await client.post("/sandboxes"), 405, None)
        assert (await client.get("/sandboxes")).status_code == 200
        problem(await client.put("/sandboxes/sbx/files/content?path=a", content=b"x"), 404, None)
        described = (await client.get("/openapi.json")).json()["paths"]
    assert set(described) == {
        "/templates",
        "/sandboxes",
        "/sandboxes/{sandbox_id}",
        "/runs",
        "/sandboxes/{sandbox_id}/runs",
        "/sandboxes/{sandbox_id}/runs/{run_id}/stdin",
    }


def test_every_operation_names_tools_that_exist():
    named = {tool for operation in OPERATIONS for tool in operation.tools}
    assert named <= tools_with(Settings(toolsets=["advanced"]))


async def test_a_bug_is_a_problem_without_details(client: httpx2.AsyncClient, box: str, monkeypatch, caplog):
    def broken(*_args: object, **_more: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("mcp_sandbox.sandboxes.service.SandboxService.get", broken)
    answer = await client.get(box)
    problem(answer, 500, None)
    assert "secret" not in answer.text
    assert "secret" in caplog.text


# -- runs --------------------------------------------------------------------------------------------------


async def test_a_run_is_answered_with_its_result(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    answer = await client.post(f"{box}/runs", json={"code": "1"})
    assert (answer.status_code, answer.json()["stdout"]["head"]) == (200, "ran\n")
    command = {"kind": "command", "command": "ls", "cwd": "/tmp", "env": {"A": "1"}}
    assert (await client.post(f"{box}/runs", json=command)).json()["kind"] == "command"
    invoke = {"kind": "invoke", "code": "def handler(e, c): ...", "event": {"a": [1]}}
    assert (await client.post(f"{box}/runs", json=invoke)).json()["kind"] == "invoke"
    assert [request.kind for request in provider.agent.requests] == ["code", "command", "invoke"]


async def test_a_one_off_run_leaves_no_sandbox(client: httpx2.AsyncClient):
    assert (await client.post("/runs", json={"code": "1"})).json()["sandbox_id"] is None
    assert (await client.get("/sandboxes")).json()["sandboxes"] == []


async def test_a_background_run_is_read_from_an_offset_and_stopped(client: httpx2.AsyncClient, box: str):
    started = await client.post(f"{box}/runs", json={"code": "forever", "background": True})
    assert started.status_code == 202
    run = started.headers["Location"].removeprefix("/api/v1")
    assert (await client.get(run)).json()["result"] is None
    assert (await client.post(f"{run}/stop")).json()["status"] == "interrupted"
    read = (await client.get(run, params={"offset": 3, "wait_s": 1})).json()
    assert (read["page"]["text"], read["result"]["stopped"]) == ("tial", True)
    problem(await client.get(f"{box}/runs/run-9"), 404, "run_not_found")


async def test_a_run_takes_input_until_it_is_closed(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    body = {"kind": "command", "command": "forever", "stdin_open": True}
    started = await client.post(f"{box}/runs", json=body)
    assert started.status_code == 202, "at once: its input needs its id"
    run = f"{box}/runs/{started.json()['run_id']}"
    sent = await client.post(f"{run}/stdin", content=b"a \xff line\n")
    assert (sent.json()["sent_bytes"], sent.json()["closed"]) == (9, False)
    assert (await client.post(f"{run}/stdin", params={"close": "true"})).json()["closed"]
    assert provider.agent.input == b"a \xff line\n<end>"
    problem(await client.post(f"{run}/stdin", content=b"x"), 409, "stdin_closed")
    problem(await client.post(f"{run}/stdin", content=bytes(2 * MB)), 413, "input_too_large")


async def test_a_run_ends_with_the_client_that_waits_for_it(app: ASGIApp, box: str, provider: FakeProvider):
    exchange = Exchange("POST", f"{box}/runs", b'{"code": "forever"}')
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange, app)
        await provider.agent.running.wait()
        exchange.leave.set()
    assert provider.agent.stops == 1
    assert exchange.status == 499


async def test_a_sandbox_whose_client_left_is_not_kept(
    app: ASGIApp, client: httpx2.AsyncClient, provider: FakeProvider
):
    provider.hold = anyio.Event()
    exchange = Exchange("POST", "/sandboxes")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange, app)
        await provider.waiting.wait()
        exchange.leave.set()
    provider.hold.set()
    assert (await client.get("/sandboxes")).json()["sandboxes"] == []


# -- events ------------------------------------------------------------------------------------------------


def events(text: str) -> list[tuple[str, str, str]]:
    """The id, the kind and the data of each event."""
    found = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields["id"], fields["event"], fields["data"]))
    return found


@pytest.fixture
async def followed(client: httpx2.AsyncClient, box: str, provider: FakeProvider) -> str:
    """The path of a run that wrote five bytes and a character of two bytes, then ended."""
    provider.agent.plans["go"] = [Output("stdout", "start"), Output("stderr", "é"), finished()]
    started = await client.post(f"{box}/runs", json={"code": "go", "background": True})
    run = started.headers["Location"].removeprefix("/api/v1")
    assert (await client.get(run, params={"wait_s": 60})).json()["result"] is not None
    return str(run)


async def test_events_bring_the_output_as_it_comes_and_then_the_result(
    app: ASGIApp, client: httpx2.AsyncClient, box: str, provider: FakeProvider
):
    more = anyio.Event()
    provider.agent.plans["go"] = [Output("stdout", "one"), more, Output("stdout", "two"), finished()]
    started = await client.post(f"{box}/runs", json={"code": "go", "background": True})
    run = started.headers["Location"].removeprefix("/api/v1")
    exchange = Exchange("GET", f"{run}/events")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange, app)
        while not any(b"one" in message.get("body", b"") for message in exchange.sent):
            await anyio.lowlevel.checkpoint()
        more.set()
    seen = events(b"".join(message.get("body", b"") for message in exchange.sent).decode())
    assert [(number, kind) for number, kind, _ in seen] == [("3", "output"), ("6", "output"), ("end", "result")]


async def test_a_client_that_reconnects_misses_and_repeats_nothing(client: httpx2.AsyncClient, followed: str):
    again = await client.get(f"{followed}/events", headers={"Last-Event-ID": "5"})
    seen = events(again.text)
    assert [(number, kind) for number, kind, _ in seen] == [("7", "output"), ("end", "result")]
    assert '"text":"é"' in seen[0][2]


async def test_after_the_last_event_there_is_nothing_to_reconnect_for(client: httpx2.AsyncClient, followed: str):
    assert (await client.get(f"{followed}/events", headers={"Last-Event-ID": "end"})).status_code == 204


async def test_what_is_no_event_id_is_refused(client: httpx2.AsyncClient, followed: str):
    problem(await client.get(f"{followed}/events", headers={"Last-Event-ID": "x"}), 400, "bad_request")


async def test_a_long_output_comes_in_pages(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    provider.agent.plans["go"] = [Output("stdout", "x" * 100_000), finished()]
    started = await client.post(f"{box}/runs", json={"code": "go", "background": True})
    answer = await client.get(f"{started.headers['Location'].removeprefix('/api/v1')}/events")
    assert [number for number, _, _ in events(answer.text)] == ["32768", "65536", "98304", "100000", "end"]


async def test_a_run_whose_machine_is_lost_ends_with_an_error_event(client: httpx2.AsyncClient, box: str, provider):
    gate = anyio.Event()
    provider.agent.plans["go"] = [Output("stdout", "last words"), gate, finished()]
    started = await client.post(f"{box}/runs", json={"code": "go", "background": True})
    path = f"{started.headers['Location'].removeprefix('/api/v1')}/events"
    answers: list[httpx2.Response] = []

    async def follow() -> None:
        answers.append(await client.get(path))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await provider.agent.running.wait()
        provider.agent.machine.ended.set()
    (_, _, written), (number, kind, data) = events(answers[0].text)
    assert "last words" in written
    assert (number, kind) == ("end", "error")
    assert '"code":"machine_lost"' in data


# -- files -------------------------------------------------------------------------------------------------


async def test_a_file_is_written_listed_and_read(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    data = bytes(range(256)) * 16 * 1024 + b"end"
    written = await client.put(f"{box}/files/content", params={"path": "a ?/b"}, content=data)
    assert written.json() == {"path": "/workspace/a ?/b", "size": len(data)}
    assert provider.agent.files["/workspace/a ?/b"] == data
    assert [entry["size"] for entry in (await client.get(f"{box}/files")).json()["entries"]] == [len(data)]
    read = await client.get(f"{box}/files/content", params={"path": "a ?/b"})
    assert read.content == data
    assert int(read.headers["Content-Length"]) == len(data)


async def test_an_empty_file_is_written_and_read(client: httpx2.AsyncClient, box: str):
    assert (await client.put(f"{box}/files/content?path=e")).json()["size"] == 0
    assert (await client.get(f"{box}/files/content?path=e")).content == b""


async def test_what_code_wrote_is_not_a_page_of_this_server(client: httpx2.AsyncClient, box: str, provider):
    provider.agent.files["/workspace/a.html"] = b"<script>"
    answer = await client.get(f"{box}/files/content?path=a.html")
    assert answer.headers["Content-Disposition"] == "attachment"
    assert answer.headers["Content-Security-Policy"].startswith("sandbox;")


async def test_a_range_of_a_file_is_read(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    provider.agent.files["/workspace/a"] = data = bytes(range(200)) * 20_000
    path = f"{box}/files/content?path=a"
    part = await client.get(path, headers={"Range": "bytes=100-3000099"})
    assert (part.status_code, part.headers["Content-Range"]) == (206, f"bytes 100-3000099/{len(data)}")
    assert part.content == data[100:3000100]
    whole = await client.get(path, headers={"Range": "bytes=1-2", "If-Range": '"x"'})
    assert (whole.status_code, len(whole.content)) == (200, len(data))
    beyond = await client.get(path, headers={"Range": f"bytes={len(data)}-"})
    problem(beyond, 416, None)
    assert beyond.headers["Content-Range"] == f"bytes */{len(data)}"


@pytest.mark.parametrize(
    ("header", "size", "part"),
    [
        (None, 10, None),
        ("bytes=0-0", 10, Span(0, 1)),
        ("bytes=2-", 10, Span(2, 8)),
        ("bytes=2-99", 10, Span(2, 8)),
        ("bytes=-3", 10, Span(7, 3)),
        ("bytes=-30", 10, Span(0, 10)),
        ("bytes=3-2", 10, None),
        ("bytes=0-1,3-4", 10, None),
        ("bytes=-", 10, None),
        ("bytes=²-", 10, None),
        ("lines=1-2", 10, None),
    ],
)
def test_one_range_of_bytes_counts_and_everything_else_means_the_whole(header, size, part):
    assert wanted(header, size) == part


@pytest.mark.parametrize(("header", "size"), [("bytes=10-", 10), ("bytes=0-", 0), ("bytes=-0", 10), ("bytes=-1", 0)])
def test_a_range_without_a_byte_cannot_be_satisfied(header: str, size: int):
    with pytest.raises(ValueError, match="range"):
        wanted(header, size)


async def test_the_head_of_a_file_reads_no_more_than_a_byte(client: httpx2.AsyncClient, box: str, provider):
    provider.agent.files["/workspace/a"] = bytes(10 * MB)
    reads: list[int] = []
    read = provider.agent.read

    async def counted(path: str, *, offset: int = 0, limit: int):
        reads.append(limit)
        return await read(path, offset=offset, limit=limit)

    provider.agent.read = counted
    head = await client.head(f"{box}/files/content?path=a")
    assert (head.headers["Content-Length"], reads) == (str(10 * MB), [1])
    await client.get(f"{box}/files/content?path=a")
    assert max(reads) == CHUNK_BYTES


async def test_a_file_without_a_size_is_read_to_its_end(client: httpx2.AsyncClient, box: str, provider):
    chunks = {0: b"Linux", 5: b""}

    async def read(path: str, *, offset: int = 0, limit: int):
        data = chunks[offset][:limit]
        return FileChunk(data, 0, not data)

    provider.agent.read = read
    assert (await client.get(f"{box}/files/content?path=/proc/version")).content == b"Linux"


async def test_a_half_sent_file_changes_nothing(app: ASGIApp, box: str, provider: FakeProvider):
    provider.agent.files["/workspace/a"] = b"before"
    exchange = Exchange("PUT", f"{box}/files/content?path=a", body=bytes(3 * MB), half_sent=True)
    exchange.leave.set()
    await exchange(app)
    assert exchange.status == 499
    assert provider.agent.files["/workspace/a"] == b"before"
    assert provider.agent.discarded == 1


async def test_a_file_that_does_not_fit_is_a_problem(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    provider.agent.room = MB
    answer = await client.put(f"{box}/files/content?path=a", content=bytes(3 * MB))
    assert problem(answer, 507, "sandbox_disk_full")["fields"] == {"path": "/workspace/a"}
    assert (provider.agent.files, provider.agent.discarded) == ({}, 1)


async def test_a_client_that_stops_sending_is_told(app: ASGIApp, box: str, provider, monkeypatch):
    monkeypatch.setattr(files, "STALLED_S", 0.01)
    exchange = Exchange("PUT", f"{box}/files/content?path=a", body=bytes(10), half_sent=True)
    await exchange(app)
    assert exchange.status == 408
    assert b"upload_stalled" in exchange.sent[-1]["body"]
    assert provider.agent.files == {}


async def test_artifacts_are_listed(client: httpx2.AsyncClient, box: str, provider: FakeProvider):
    provider.agent.draws("draw", "a.png")
    await client.post(f"{box}/runs", json={"code": "draw"})
    [artifact] = (await client.get(f"{box}/artifacts")).json()["artifacts"]
    assert artifact["mime_type"] == "image/png"
    assert (await client.get(f"{box}/files/content", params={"path": artifact["path"]})).content == PNG


# -- idempotency keys --------------------------------------------------------------------------------------

KEY = {"Idempotency-Key": "k1"}


async def test_a_request_with_a_key_is_carried_out_once(client: httpx2.AsyncClient, provider: FakeProvider):
    first = await client.post("/sandboxes", headers=KEY)
    again = await client.post("/sandboxes", headers=KEY)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["Location"] == first.headers["Location"]
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert len(provider.agents) == 1


async def test_a_run_with_a_key_goes_on_without_its_client(app: ASGIApp, client, box: str, provider: FakeProvider):
    gate = anyio.Event()
    provider.agent.plans["go"] = [gate, Output("stdout", "done"), finished()]
    body = b'{"code": "go"}'
    exchange = Exchange("POST", f"{box}/runs", body, dict(KEY))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange, app)
        await provider.agent.running.wait()
        exchange.leave.set()
    gate.set()
    kind = {"Content-Type": "application/json"}
    answer = await client.post(f"{box}/runs", content=body, headers=KEY | kind)
    assert answer.json()["stdout"]["head"] == "done"
    assert (provider.agent.stops, len(provider.agent.requests)) == (0, 1)


async def test_a_key_belongs_to_one_request_of_one_owner(app: ASGIApp, client: httpx2.AsyncClient, box: str):
    assert (await client.post(f"{box}/runs", json={"code": "1"}, headers=KEY)).status_code == 200
    told = await client.post(f"{box}/runs", json={"code": "2"}, headers=KEY)
    problem(told, 422, "idempotency_key_reused")
    async with client_of(as_owner(app, "bob")) as his:
        assert (await his.post("/sandboxes", headers=KEY)).status_code == 201


async def test_a_failure_before_anything_was_done_does_not_use_up_the_key(client, provider: FakeProvider):
    provider.error = StartFailed("no memory")
    problem(await client.post("/sandboxes", headers=KEY), 503, "start_failed")
    provider.error = None
    assert (await client.post("/sandboxes", headers=KEY)).status_code == 201


async def test_a_lost_run_is_never_repeated(client: httpx2.AsyncClient, provider: FakeProvider):
    for _ in range(2):
        problem(await client.post("/runs", json={"code": "die"}, headers=KEY), 502, "run_lost")
    assert len(provider.agents) == 1


# -- the document ------------------------------------------------------------------------------------------


async def test_the_document_names_every_operation_and_its_examples_are_valid(client: httpx2.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, there in document["paths"].items() for method in there}
    assert described == {(operation.method, operation.path) for operation in OPERATIONS}
    for place, schema, example in examples(document):
        validator = jsonschema.Draft202012Validator({**document, **schema})
        assert list(validator.iter_errors(example)) == [], place


def test_the_document_does_not_send_callers_to_tools():
    tools = tools_with(Settings(toolsets=("advanced",)))
    described = list(descriptions(openapi.document(OPERATIONS)))
    assert len(described) > len(OPERATIONS)
    assert [text for text in described if any(re.search(rf"\b{tool}\b", text) for tool in tools)] == []


def descriptions(part: object) -> Iterator[str]:
    """Every description in a part of the document."""
    if isinstance(part, list):
        part = dict(enumerate(part))
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("description", "summary") and isinstance(value, str):
                yield value
            yield from descriptions(value)


def examples(document: Mapping[str, Any]):
    """Every example of the document with its schema."""
    found = 0
    for path, there in document["paths"].items():
        for method, operation in there.items():
            for status, response in operation["responses"].items():
                for content in response.get("content", {}).values():
                    if "example" in content:
                        found += 1
                        yield f"{method} {path} {status}", content["schema"], content["example"]
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", []):
            found += 1
            yield name, schema, example
    assert found > len(document["paths"])
