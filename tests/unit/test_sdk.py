"""The SDK over fake machines: lost connections, cancelled calls, errors as the service raised them, and notebooks."""

import base64
import html
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import pytest

from guest.client.messages import Chart, Display, FileInfo, Kind, Listing, Output
from mcp_sandbox.errors import (
    BadRequest,
    FileNotFound,
    FileTooLarge,
    SandboxBusy,
    SandboxClosed,
    SandboxError,
    SearchFailed,
    StdinClosed,
    UnknownTemplate,
    WrongFileKind,
    error_types,
)
from mcp_sandbox.rest.examples import RUN
from mcp_sandbox.rest.problems import problem_of
from mcp_sandbox.sdk import RunResult, files
from mcp_sandbox.sdk import sandbox as sdk_sandbox
from mcp_sandbox.sdk.errors import NoConnection, NotOffered, TokenRefused, UnexpectedAnswer, error_of
from mcp_sandbox.sdk.link import authorization, checked_address, view
from mcp_sandbox.sdk.runs import INPUT_BYTES
from mcp_sandbox.views import ImageView, OutputPage, StreamView
from tests.unit import test_fetch_tool, test_web_search
from tests.unit.fakes import PNG, FakeProvider, finished
from tests.unit.sdk_client import FaultyTransport, faulty, lost, sandbox
from tests.unit.test_errors import RAISED, example

URL = "http://127.0.0.1:8000"


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def transport(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyTransport]:
    async with faulty(monkeypatch, provider) as transport:
        yield transport


# -- connections that break --------------------------------------------------------------------------------


async def test_a_run_whose_answer_is_lost_is_asked_for_again_and_runs_once(
    provider: FakeProvider, transport: FaultyTransport
):
    async with sandbox() as box:
        transport.faults += [("POST /api/v1/sandboxes/", lost)] * 3
        assert (await box.run("1")).output == "ran\n"
    assert transport.count("/runs") - transport.count("/events") == 4
    assert [request.code for request in provider.agent.requests] == ["1"]


async def test_a_sandbox_whose_creation_is_not_answered_exists_once(provider: FakeProvider, transport: FaultyTransport):
    transport.faults += [("POST", lost)] * 2
    async with sandbox():
        assert provider.alive == 1
    assert provider.alive == 0


async def test_output_goes_on_where_the_connection_broke(provider: FakeProvider, transport: FaultyTransport):
    go = anyio.Event()
    provider.plans["two"] = [Output("stdout", "one\n"), go, Output("stdout", "two\u2028\n"), finished()]

    async def first_event_only(answer: httpx2.Response) -> AsyncIterator[bytes]:
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        async for part in answer.stream:
            yield part
            if b"one" in part:
                go.set()
                raise httpx2.ReadError("connection reset by peer")

    def breaks(_request: httpx2.Request, answer: httpx2.Response) -> httpx2.Response:
        return httpx2.Response(answer.status_code, headers=answer.headers, content=first_event_only(answer))

    transport.faults.append(("/events", breaks))
    async with sandbox() as box:
        *output, result = [event async for event in box.stream("two")]
    assert [page.text for page in output if isinstance(page, OutputPage)] == ["one\n", "two\u2028\n"]
    assert isinstance(result, RunResult)
    assert transport.count("/events") == 2


async def test_what_has_no_key_is_not_sent_again(transport: FaultyTransport):
    async with sandbox() as box:
        transport.faults.append(("/pause", lost))
        with pytest.raises(NoConnection, match="connection reset by peer"):
            await box.pause()
        assert transport.count("/pause") == 1


async def test_a_server_that_asks_for_patience_is_asked_again(transport: FaultyTransport):
    def later(_request: httpx2.Request, _answer: httpx2.Response) -> httpx2.Response:
        return httpx2.Response(429, headers={"Retry-After": "0"}, json={"title": "Too many requests.", "status": 429})

    async with sandbox() as box:
        transport.faults += [("/sandboxes/", later)] * 3
        assert (await box.info()).state == "ready"
        transport.faults += [("/sandboxes/", later)] * 4
        with pytest.raises(UnexpectedAnswer, match=r"status 429: Too many requests\."):
            await box.info()


async def test_a_connection_that_stays_broken_is_an_error_with_the_next_step(transport: FaultyTransport):
    async with sandbox() as box:
        transport.faults += [("/sandboxes/", lost)] * 4
        with pytest.raises(NoConnection, match="connection reset by peer") as caught:
            await box.info()
    assert "mcp-sandbox serve" in caught.value.hint
    assert caught.value.hint in caught.value.__notes__


# -- calls that end early ----------------------------------------------------------------------------------


async def test_a_cancelled_run_is_stopped(provider: FakeProvider, transport: FaultyTransport):
    async with sandbox() as box:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run, "forever")
            await provider.agent.running.wait()
            tasks.cancel_scope.cancel()
        assert provider.agent.stops == 1
        assert (await box.run("1")).output == "ran\n"


async def test_a_command_runs_in_the_background_beside_others(provider: FakeProvider, transport: FaultyTransport):
    async with sandbox() as box:
        server = await box.start_command("forever")
        assert (await box.run_command("ls")).output == "ran\n"
        assert (await box.run("1")).output == "ran\n"
        assert (await box.info()).run_ids == [server.run_id]
        assert (await server.stop()).status == "interrupted"
        result = [event async for event in server][-1]
        assert isinstance(result, RunResult)
        assert (await server.wait()).run_id == result.run_id


async def test_a_run_gets_input_in_requests_of_a_bounded_size(provider: FakeProvider, transport: FaultyTransport):
    async with sandbox() as box:
        run = await box.start("forever", stdin_open=True)
        await run.write_stdin("x" * (INPUT_BYTES + 1))
        await run.close_stdin()
        assert provider.agent.input == b"x" * (INPUT_BYTES + 1) + b"<end>"
        assert transport.count("stdin") == 3
        with pytest.raises(StdinClosed):
            await run.write_stdin(b"more")


async def test_leaving_a_stream_stops_its_run(provider: FakeProvider, transport: FaultyTransport):
    provider.plans["waits"] = [Output("stdout", "one\n"), anyio.Event(), finished()]
    async with sandbox() as box:
        events = box.stream("waits")
        assert isinstance(await anext(events), OutputPage)
        with pytest.raises(SandboxBusy):
            await box.run("1")
        await events.aclose()
        assert (await box.run("1")).output == "ran\n"


async def test_a_sandbox_whose_creation_is_cancelled_is_closed(provider: FakeProvider, transport: FaultyTransport):
    provider.hold = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox().open)
        await provider.waiting.wait()
        tasks.cancel_scope.cancel()
        provider.hold.set()
    assert transport.count("DELETE") == 1
    assert provider.alive == 0


async def test_an_exception_in_the_block_closes_the_sandbox(provider: FakeProvider, transport: FaultyTransport):
    with pytest.raises(ZeroDivisionError):
        async with sandbox():
            _ = 1 / 0
    assert provider.alive == 0


async def test_a_sandbox_that_has_expired_can_be_closed(provider: FakeProvider, transport: FaultyTransport):
    async with sandbox():
        provider.agent.machine.ended.set()
        await provider.released.wait()


# -- what is not open --------------------------------------------------------------------------------------


async def test_a_sandbox_is_used_only_while_it_is_open(transport: FaultyTransport):
    box = sandbox()
    with pytest.raises(BadRequest, match=r"not open.*open\(\)"):
        await box.run("1")
    async with box:
        with pytest.raises(BadRequest, match="opened before"):
            await box.open()
    with pytest.raises(SandboxClosed) as caught:
        await box.files.read("a")
    assert caught.value.hint == "Create a new one."
    await box.close()


async def test_any_task_may_close_a_sandbox(provider: FakeProvider, transport: FaultyTransport):
    box = sandbox()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.open)
    [copy] = await box.fork()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.close)
    assert (await copy.run("1")).output == "ran\n"
    await copy.close()
    assert provider.alive == 0


# -- files -------------------------------------------------------------------------------------------------


async def test_a_file_that_is_too_large_for_memory_is_refused(transport: FaultyTransport):
    async with sandbox() as box:
        await box.files.write("a", bytes(1001))
        with pytest.raises(FileTooLarge, match="1,001 bytes; at most 1,000") as caught:
            await box.files.read("a", max_bytes=1000)
        assert caught.value.hint == "Use files.download."


async def test_bytes_that_are_no_text_are_not_guessed(transport: FaultyTransport):
    async with sandbox() as box:
        await box.files.write("a", b"\xff\xfe")
        with pytest.raises(WrongFileKind, match="not UTF-8 text"):
            await box.files.read_text("a")
        assert await box.files.read("a") == b"\xff\xfe"


async def test_a_download_that_fails_leaves_nothing(transport: FaultyTransport, tmp_path: Any):
    async with sandbox() as box:
        with pytest.raises(FileNotFound):
            await box.files.download("missing", tmp_path)
        await box.files.write("there", "x")
        transport.faults += [("/files/content", lost)] * 4
        with pytest.raises(NoConnection):
            await box.files.download("there", tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert (await box.files.download("there", tmp_path)).read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


# -- the web -----------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {"web": {"brave_key": "s3cret", "providers": ["brave"]}}


async def test_a_search_finds_pages(monkeypatch: pytest.MonkeyPatch):
    jobs = test_web_search.FakeJobs(brave=test_web_search.results(1))
    async with faulty(monkeypatch, jobs=jobs, **KEYS), sandbox() as box:
        found = await box.search("snow", site="example.org", max_results=3)
    assert [result.url for result in found.results] == ["https://example.org/1"]
    assert (jobs.fields[0]["site"], jobs.fields[0]["count"]) == ("example.org", 3)


async def test_a_page_is_fetched_and_saved_in_the_sandbox(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch):
    async with faulty(monkeypatch, provider, test_fetch_tool.FakeJobs("0123456789")), sandbox() as box:
        page = await box.fetch(test_fetch_tool.URL, max_chars=4)
        assert (page.text, page.saved) == ("0123", None)
        saved = (await box.fetch(test_fetch_tool.URL, save=True)).saved
        assert saved is not None
        assert await box.files.read(saved.path) == b"0123456789"


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.code)
def test_every_error_of_the_service_arrives_as_it_was_raised(kind: type[SandboxError]):
    raised = example(kind)
    problem = problem_of(raised)
    arrived = error_of(URL, "GET /", problem.status, problem.model_dump_json().encode())
    assert type(arrived) is kind
    assert (arrived.fields, str(arrived)) == (raised.fields, str(raised))
    assert not problem.hint or arrived.hint == problem.hint


async def test_a_wrong_template_is_the_services_own_error(transport: FaultyTransport):
    box = sandbox()
    box._wanted["template"] = "nope"
    with pytest.raises(UnknownTemplate, match="There is no template 'nope'") as caught:
        await box.open()
    assert "python-data-analysis" in caught.value.known


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, {"title": "Send a valid token: Authorization: Bearer …"}, TokenRefused, "Send a valid token"),
        (403, {"title": "The token lacks the scope use."}, TokenRefused, "lacks the scope use"),
        (404, {"title": "Not Found", "code": None}, NotOffered, "does not offer POST /fork"),
        (500, {"title": "Internal Server Error", "code": None}, UnexpectedAnswer, "status 500: Internal Server Error"),
        (400, {"code": "from_tomorrow", "detail": "New.", "hint": "Do."}, UnexpectedAnswer, "status 400: New"),
        (422, {"code": "template_not_found", "detail": "No.", "fields": {}}, UnexpectedAnswer, "status 422: No"),
        (502, "<h1>Bad Gateway</h1>", UnexpectedAnswer, "status 502: .*Bad Gateway"),
    ],
)
def test_other_answers_are_explained(status: int, body: Any, kind: type[SandboxError], words: str):
    with pytest.raises(kind, match=words):
        raise error_of(URL, "POST /fork", status, json.dumps(body).encode())


def test_an_error_of_a_newer_server_keeps_its_hint():
    error = error_of(URL, "GET /", 400, b'{"code": "from_tomorrow", "detail": "New.", "hint": "Do this."}')
    assert error.hint == "Do this."
    assert SearchFailed("x", []).hint == ""  # a hint belongs to one error


def test_hints_are_no_fields():
    assert not [kind for kind in error_types() if "hint" in kind.__dataclass_fields__]


def test_a_view_of_a_newer_server_may_have_more_fields():
    told = {**RUN.model_dump(mode="json"), "news": 1, "stdout": {"head": "42\n", "colour": "red"}}
    assert view(RunResult, json.dumps(told)).output == "42\n"


# -- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/mcp", f"{URL}/api/v1/"])
def test_an_address_may_be_that_of_any_face(url: str):
    assert checked_address(url) == URL


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", ""])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(BadRequest, match="is not the address of a server, such as http://"):
        checked_address(url)


def test_a_token_may_come_from_a_file():
    assert authorization("abc\n") == {"Authorization": "Bearer abc"}
    assert authorization("") == {}
    with pytest.raises(BadRequest, match="no token has"):
        authorization("a\nb")


# -- results -----------------------------------------------------------------------------------------------


def result(**changes: Any) -> RunResult:
    return RunResult.model_validate({**dict(RUN), **changes})


def test_a_result_has_output_and_metrics():
    shown = result(displays=(Display({"text/plain": "7", "text/html": "<b>7</b>"}),))
    assert (shown.output, shown.ok, shown.metrics.run_ms) == ("42\n7\n", True, 4.2)
    long = result(stdout=StreamView(head="a", tail="z", omitted_bytes=1000))
    assert long.output == "a\n[… 1,000 bytes omitted …]\nz"


def test_the_values_of_a_result_have_their_forms():
    chart = Chart(type="line", title="T")
    shown = result(
        displays=(
            Display({"text/markdown": "# a", "text/html": "<h1>a</h1>", "application/json": "[1]"}),
            Display({"text/plain": 'line chart "T"'}, ("/tmp/outputs/figure-1.png",), chart),
        ),
        images=(ImageView(path="/tmp/outputs/figure-1.png", mime_type="image/png", data=PNG),),
    )
    first, last = shown.results
    assert (first.text, first.html, first.json, first.png, first.chart) == ("# a", "<h1>a</h1>", "[1]", None, None)
    assert (last.png, last.jpeg, last.chart, last.html, shown.result) == (PNG, None, chart, None, last)
    assert shown.output == '42\n# a\nline chart "T"\n'


def test_nothing_that_code_wrote_is_html_in_a_notebook():
    evil = "<script>alert(1)</script>"
    shown = result(
        status="error",
        stdout=StreamView(head=evil),
        stderr=StreamView(head=evil),
        displays=(Display({"text/html": evil, "text/plain": "x"}), Display({"image/svg+xml": evil})),
        error={"name": "E", "message": evil, "traceback": f"\x1b[31m{evil}"},
        artifacts=({"path": f"/tmp/outputs/{evil}", "size": 1, "mime_type": "text/html"},),
        images=(
            ImageView(path="a.svg", mime_type="image/svg+xml", data=evil.encode()),
            ImageView(path="a.png", mime_type="image/png", data=PNG),
        ),
    )._repr_html_()
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 5
    assert (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:30em;border:0" srcdoc="{html.escape(evil)}">'
        in shown
    )
    assert f'<img src="data:image/png;base64,{base64.b64encode(PNG).decode()}">' in shown
    assert f'<img src="data:image/svg+xml;base64,{base64.b64encode(evil.encode()).decode()}">' in shown
    assert "\x1b" not in shown


# -- imports -----------------------------------------------------------------------------------------------


def test_importing_the_product_imports_nothing_else():
    code = "import sys, mcp_sandbox; print(sorted(name for name in sys.modules if name.startswith('mcp_sandbox')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['mcp_sandbox']\n"


def test_a_client_of_a_server_does_not_import_the_server():
    code = "import sys; from mcp_sandbox import Sandbox; print({'uvicorn', 'mcp', 'mcp_sandbox.app'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# -- hostile machines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "dir"])
async def test_a_listing_that_never_ends_is_given_up(
    provider: FakeProvider, transport: FaultyTransport, monkeypatch: pytest.MonkeyPatch, kind: Kind
):
    async def endless(path: str, **_options: object) -> Listing:
        return Listing((FileInfo(f"{path}/again", kind, 1, 0.0),), truncated=True)

    for module in (files, sdk_sandbox):
        monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    async with sandbox() as box:
        monkeypatch.setattr(provider.agent, "list", endless)
        with pytest.raises(BadRequest, match="more entries than a listing shows"):
            await box.files.list()
        with pytest.raises(BadRequest, match="more files than a listing shows"):
            await box.list_artifacts()
    assert (transport.count("/files"), transport.count("/artifacts")) == (5, 5)
