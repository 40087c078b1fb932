"""The gate in front of the HTTP server: names, origins, tokens and rates."""

import socket
from collections.abc import Callable
from typing import Any

import anyio
import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from mcp_sandbox.accounts.owners import current_owner
from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.config import ServeSettings
from mcp_sandbox.serving.gate import Challenge, FindToken, Gate, Names, RateLimit
from mcp_sandbox.serving.http import UnsafeAddress, guard, listening
from tests.waiting import HANG_S

TOKENS = {
    "secret-a": Token("ana's laptop", "ana"),
    "secret-b": Token("bob", "bob", ("operate",)),
    "secret-c": Token("cy", "cy", requests_per_minute=1),
    "secret-d": Token("di", "di", ("read",)),
}


async def find(secret: str) -> Token | None:
    return TOKENS.get(secret)


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(current_owner())(scope, receive, send)


def gate(names: Names | None = None, find: FindToken | None = find, clock: Callable[[], float] = lambda: 0.0) -> Gate:
    return Gate(who, names or Names(), find, RateLimit(600, clock))


async def ask(app: Gate, path: str = "/mcp", host: str = "127.0.0.1:8000", **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        return await client.get(path, headers={"Host": host, **headers})


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def test_a_token_names_the_owner():
    answer = await ask(gate(), **bearer("secret-a"))
    assert (answer.status_code, answer.text) == (200, "ana")


async def test_without_tokens_every_program_of_this_host_is_let_in():
    assert (await ask(gate(find=None))).text == "local"


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("secret-x"), {"Authorization": "Basic secret-a"}, {"Authorization": "secret-a"}],
    ids=["none", "empty", "unknown", "another kind", "no kind"],
)
async def test_without_a_valid_token_the_answer_says_how_to_send_one(headers):
    answer = await ask(gate(), "/api/v1/sandboxes", **headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert "Authorization: Bearer" in answer.json()["title"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_load_balancers_need_no_token(path):
    assert (await ask(gate(), path)).status_code == 200


async def test_metrics_need_a_scope_of_their_own():
    assert (await ask(gate(), "/metrics", **bearer("secret-a"))).status_code == 403
    assert (await ask(gate(), "/metrics", **bearer("secret-b"))).status_code == 200
    assert (await ask(gate(), "/mcp", **bearer("secret-b"))).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost:8000", "[::1]:8000", "[::1]"])
async def test_a_local_server_is_reached_by_the_names_of_loopback(host):
    assert (await ask(gate(find=None), host=host)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:8000", "127.0.0.1.evil.test", "localhost.evil.test:80", "", "127.0.0.1:80:80"]
)
async def test_a_page_that_points_its_own_name_at_this_address_is_refused(host):
    assert (await ask(gate(find=None), host=host)).status_code == 421


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://127.0.0.1.evil.test", "file://127.0.0.1"])
async def test_a_strange_web_page_is_refused(origin):
    assert (await ask(gate(find=None), Origin=origin)).status_code == 403


async def test_a_public_server_is_reached_only_by_the_names_of_the_settings():
    names = Names(("box.test",), ("https://app.test",), loopback=False)
    assert (await ask(gate(names, find=None), host="box.test", Origin="https://app.test")).status_code == 200
    assert (await ask(gate(names, find=None), host="127.0.0.1:8000")).status_code == 421
    assert (await ask(gate(names, find=None), host="box.test", Origin="http://localhost")).status_code == 403


async def test_an_owner_with_too_many_requests_is_told_when_to_come_back_and_others_go_on():
    now = [0.0]
    app = gate(clock=lambda: now[0])
    assert (await ask(app, **bearer("secret-c"))).status_code == 200
    refused = await ask(app, **bearer("secret-c"))
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "61")
    assert (await ask(app, **bearer("secret-a"))).status_code == 200
    now[0] = 60
    assert (await ask(app, **bearer("secret-c"))).status_code == 200


async def test_an_mcp_client_is_told_in_its_own_language():
    app = gate()
    assert (await ask(app, **bearer("secret-c"))).status_code == 200
    refused = await ask(app, **bearer("secret-c"))
    assert (refused.status_code, refused.headers["Content-Type"]) == (429, "application/json")
    assert refused.json()["error"]["message"] == "Too many requests with this token. Send the next one in 61 s."


async def test_a_token_that_may_read_is_let_in():
    assert (await ask(gate(), **bearer("secret-d"))).text == "di"
    assert (await ask(gate(), "/metrics", **bearer("secret-d"))).status_code == 403


async def test_an_oauth_client_learns_where_to_get_a_token_and_what_is_wrong_with_its_own():
    metadata = "https://box.test/.well-known/oauth-protected-resource/mcp"
    app = Gate(who, Names(), find, RateLimit(600), Challenge(metadata))
    for headers, path, parameters in (
        ({}, "/mcp", ""),
        (bearer("secret-x"), "/mcp", 'error="invalid_token", '),
        (bearer("secret-a"), "/metrics", 'error="insufficient_scope", scope="operate", '),
    ):
        answer = await ask(app, path, **headers)
        assert answer.headers["WWW-Authenticate"] == f'Bearer {parameters}resource_metadata="{metadata}"'
    assert (await ask(app, "/.well-known/oauth-protected-resource/mcp")).status_code == 200


async def test_a_server_that_stops_takes_nothing_new_but_is_alive():
    app = gate(find=None)
    app.draining = True
    assert (await ask(app)).status_code == 503
    assert (await ask(app, "/readyz")).status_code == 503
    assert (await ask(app, "/healthz")).status_code == 200


class NoAccounts:
    find = None

    def exist(self):
        return False


class SomeAccounts(NoAccounts):
    def exist(self):
        return True


@pytest.mark.parametrize(
    ("settings", "accounts", "missing"),
    [
        (ServeSettings(host="0.0.0.0"), NoAccounts(), "no token"),
        (ServeSettings(host="::", allowed_hosts=("box.test",)), NoAccounts(), "no token"),
        (ServeSettings(host="10.1.2.3"), SomeAccounts(), "allowed_hosts"),
        (ServeSettings(require_token=True), NoAccounts(), "require_token"),
    ],
)
def test_a_server_that_others_could_use_does_not_start(settings, accounts, missing):
    with pytest.raises(UnsafeAddress, match=missing):
        guard(settings, accounts)


def test_answers_in_several_parts_are_sent_at_once():
    with listening(ServeSettings(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_only_http_and_websockets_pass():
    async def never(*_args: object) -> Any:
        pytest.fail("passed")

    with pytest.raises(ValueError, match="lifespan"):
        await Gate(never, Names(), None, RateLimit(600))({"type": "lifespan"}, never, never)


async def websocket(app: Gate, **headers: str) -> int:
    """The status that a WebSocket is answered with; the application behind the gate answers 200."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {
        "type": "websocket",
        "path": "/api/v1/sandboxes/sb-1/terminal",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "extensions": {"websocket.http.response": {}},
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_a_websocket_passes_the_same_gate_and_no_page_opens_one_unless_it_is_allowed():
    here = {"Host": "127.0.0.1:8000"}
    allowed = Names(origins=["https://ide.example"])
    assert await websocket(gate(find=None), **here) == 200
    assert await websocket(gate(find=None), Host="evil.example") == 421
    assert await websocket(gate(find=None), **here, Origin="https://evil.example") == 403
    assert await websocket(gate(find=None), **here, Origin="http://localhost:3000") == 403
    assert await websocket(gate(allowed, find=None), **here, Origin="https://ide.example") == 200
    assert await websocket(gate(), **here) == 401
    assert await websocket(gate(), **here, **bearer("secret-a")) == 200


async def test_an_open_websocket_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mcp_sandbox.serving.gate.RECHECK_S", 0.01)
    revoked = anyio.Event()

    async def find_until_revoked(secret: str) -> Token | None:
        return None if revoked.is_set() else await find(secret)

    async def open_terminal(_scope: Scope, _receive: Receive, _send: Send) -> None:
        revoked.set()
        await anyio.sleep_forever()

    async def nothing(*_args: object) -> Any:
        return {}

    headers = {"Host": "127.0.0.1:8000", **bearer("secret-a")}
    scope = {
        "type": "websocket",
        "path": "/api/v1/sandboxes/sb-1/terminal",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    with anyio.fail_after(HANG_S):
        await Gate(open_terminal, Names(), find_until_revoked, RateLimit(600))(scope, nothing, nothing)
