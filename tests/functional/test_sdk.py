"""The SDK with real machines, each feature on a server and embedded in this process."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx2
import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from mcp_sandbox import AsyncSandbox, Sandbox
from mcp_sandbox.accounts.tokens import Tokens
from mcp_sandbox.errors import FileNotFound, UnknownTemplate
from mcp_sandbox.sdk import RunResult
from mcp_sandbox.sdk.errors import NoConnection, NotOffered, TokenRefused
from mcp_sandbox.views import OutputPage
from tests.functional.checkout import REPO
from tests.functional.test_http_server import serving, tokens
from tests.waiting import HANG_S, assert_soon_empty, promised

__all__ = ["tokens"]

pytestmark = pytest.mark.vm

MB = 1 << 20
WAITS = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('two')"
CHART = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('drawn')\n6 * 7"
DRAWN = "drawn\nline chart; series: 2 points\n42\n"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(toolsets="advanced")) as (_process, address),
    ):
        yield address.removesuffix("/mcp")


@pytest.fixture(scope="module", params=["server", "embedded"])
def base_url(request: pytest.FixtureRequest) -> str | None:
    return str(request.getfixturevalue("server")) if request.param == "server" else None


@pytest.fixture(scope="module")
def box(base_url: str | None) -> Iterator[Sandbox]:
    with Sandbox(base_url=base_url) as box:
        yield box


def machines() -> set[psutil.Process]:
    """The processes of embedded machines, and of the server."""
    return {*psutil.Process().children(recursive=True)}


# -- the features, blocking --------------------------------------------------------------------------------


def test_a_result_has_output_metrics_and_artifacts(box: Sandbox):
    result = box.run(CHART)
    assert (result.ok, result.output) == (True, DRAWN)
    assert 0 < result.metrics.run_ms <= result.metrics.total_ms
    [artifact] = result.artifacts
    assert [each.path for each in box.list_artifacts()] == [artifact.path]
    picture = box.read_artifact(artifact.path)
    assert box.read_artifact(Path(artifact.path).name) == picture
    assert '<img src="data:image/png;base64,' in result._repr_html_()


def test_variables_are_kept_and_failing_code_is_a_result(box: Sandbox):
    box.run("x = 0")
    failed = box.run("1 / x")
    assert failed.error is not None
    assert (failed.ok, failed.error.name) == (False, "ZeroDivisionError")


def test_a_command_has_an_environment_a_directory_input_and_an_exit_code(box: Sandbox):
    result = box.run_command("cat; echo $A; pwd; exit 3", env={"A": "b"}, cwd="/tmp", stdin="in ")
    assert (result.output, result.exit_code) == ("in b\n/tmp\n", 3)


def test_output_that_is_no_text_does_not_break_a_run(box: Sandbox):
    assert "\ufffd" in box.run_command(r"printf '\377\376\0'").output


def test_a_stream_shows_output_while_the_code_runs(box: Sandbox):
    seen = []
    for event in box.stream(WAITS):
        seen.append(event.text if isinstance(event, OutputPage) else event.status)
        if seen == ["one\n"]:
            box.files.write("go", "")  # the code waits for it, so it is running now
    assert seen == ["one\n", "two\n", "ok"]


def test_leaving_a_stream_stops_the_run(box: Sandbox):
    for event in box.stream("print(1, flush=True)\nimport time\ntime.sleep(600)"):
        assert isinstance(event, OutputPage)
        break
    assert box.run("print('free')").output == "free\n"


def test_a_server_in_the_background_is_reachable_and_a_run_reads_what_is_sent(box: Sandbox):
    server = box.start_command("exec python3 -u -m http.server 8000 --bind 127.0.0.1")
    assert any("Serving" in event.text for event in server if isinstance(event, OutputPage))
    box.files.write("served", "found")
    get = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/served').read().decode())"
    assert box.run_command(f'python3 -c "{get}"').output == "found\n"
    assert box.run(get).output == "found\n"
    asking = box.start("print('hello', input('name? '))", stdin_open=True)
    asking.write_stdin("you\n")
    assert asking.wait().output == "name? hello you\n"
    assert "GET /served" in server.stop().stderr.head


def test_files_go_in_and_out(box: Sandbox, tmp_path: Path):
    box.files.write("deep/text.txt", "grüße")
    assert box.files.read_text("deep/text.txt") == "grüße"
    [entry] = box.files.list("deep")
    assert (entry.path, entry.size) == ("/workspace/deep/text.txt", 7)
    assert "/workspace/deep/text.txt" in [each.path for each in box.files.list(recursive=True)]
    with pytest.raises(FileNotFound) as caught:
        box.files.read("missing")
    assert caught.value.hint


def test_a_large_file_is_copied_both_ways(box: Sandbox, tmp_path: Path):
    source = tmp_path / "large.bin"
    source.write_bytes(os.urandom(MB) * 24 + b"end")
    written = box.files.upload(source)
    assert (written.path, written.size) == ("/workspace/large.bin", 24 * MB + 3)
    inside = box.run("import hashlib; print(hashlib.sha256(open('large.bin', 'rb').read()).hexdigest())").output.strip()
    copy = box.files.download("large.bin", tmp_path / "copy.bin")
    assert inside == hashlib.sha256(copy.read_bytes()).hexdigest() == hashlib.sha256(source.read_bytes()).hexdigest()


def test_a_listing_of_several_pages_is_complete(box: Sandbox):
    box.run_command("mkdir many /tmp/outputs/many; cd many; touch {1..1200}; cp * /tmp/outputs/many")
    assert len(box.files.list("many")) == 1200
    assert len([each for each in box.list_artifacts() if "/many/" in each.path]) == 1200
    box.run_command("rm -r many /tmp/outputs/many")


def test_a_copy_has_the_state_and_its_own_life(box: Sandbox):
    box.run("state = 'shared'")
    copies = box.fork(2)
    for number, copy in enumerate(copies):
        assert copy.run(f"own = {number}; state").output == "'shared'\n"
    copies[0].close()
    assert copies[1].run("own").output == "1\n"
    copies[1].close()
    assert box.run("'own' in globals()").output == "False\n"


def test_a_paused_sandbox_goes_on(box: Sandbox):
    box.run("before = 1")
    assert box.pause().state == "paused"
    assert box.resume().state == "ready"
    assert box.run("before").output == "1\n"


def test_code_runs_once_in_a_sandbox_of_its_own(base_url: str | None):
    result = Sandbox.run_once("print(6 * 7)", template="python-data-analysis", base_url=base_url)
    assert result.output == "42\n"


def test_an_unknown_template_is_named_with_those_there_are(base_url: str | None):
    with pytest.raises(UnknownTemplate, match="nope") as caught, Sandbox("nope", base_url=base_url):
        pass
    assert "python-data-analysis" in caught.value.known


async def test_an_exception_ends_the_machine(base_url: str | None, server: str):
    before = machines()

    def fails() -> None:
        with Sandbox(base_url=base_url):
            assert machines() - before
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    await assert_soon_empty(lambda: machines() - before, promised())


# -- asynchronous, and in a running loop -------------------------------------------------------------------


async def test_the_asynchronous_sandbox_does_the_same(base_url: str | None, tmp_path: Path):
    async with AsyncSandbox(base_url=base_url) as box:
        assert (await box.run(CHART)).output == DRAWN
        [artifact] = await box.list_artifacts()
        assert len(await box.read_artifact(artifact.path)) == artifact.size
        events = []
        async for event in box.stream(WAITS):
            events.append(event)
            await box.files.write("go", "")
        assert isinstance(events[-1], RunResult)
        (tmp_path / "up").write_text("content")
        await box.files.upload(tmp_path / "up")
        assert (await (await box.fork())[0].run_command("cat up")).output == "content"
        with anyio.move_on_after(1):
            await box.run("import time\ntime.sleep(600)")
        assert (await box.run("print('free')")).output == "free\n"


async def test_two_embedded_sandboxes_share_one_service():
    async with AsyncSandbox(base_url=None) as one, AsyncSandbox(base_url=None) as two:
        with pytest.raises(FileNotFound):
            await two.files.read("a")
        await one.files.write("a", "1")
        assert (await one.info()).sandbox_id != (await two.info()).sandbox_id


async def test_the_blocking_sandbox_works_inside_a_running_loop(base_url: str | None):
    """As in a cell of a notebook, whose kernel runs a loop in this thread."""
    box = Sandbox(base_url=base_url).open()
    try:
        assert box.run("print(1)").output == "1\n"
        assert [type(event) for event in box.stream("print(2)")] == [OutputPage, RunResult]
    finally:
        box.close()


# -- how programs end --------------------------------------------------------------------------------------

FORGETS = """
import sys, psutil
from mcp_sandbox import Sandbox
box = Sandbox(base_url=sys.argv[1] or None).open()
print(box.sandbox_id, *(child.pid for child in psutil.Process().children(recursive=True)))
"""
INTERRUPTED = """
import sys
from mcp_sandbox import Sandbox
with Sandbox(base_url=sys.argv[1] or None) as box:
    try:
        for event in box.stream("print('started', flush=True)\\nimport time\\ntime.sleep(600)"):
            print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        print(box.run("print('free')").output, flush=True)
"""


def program(code: str, base_url: str | None) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, base_url or ""], cwd=REPO, stdout=subprocess.PIPE, text=True)


async def test_a_program_that_forgets_to_close_leaves_nothing(base_url: str | None):
    with program(FORGETS, base_url) as process:
        told, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    sandbox_id, *pids = told.split()
    if base_url is None:
        assert pids
        await assert_soon_empty(lambda: [pid for pid in pids if psutil.pid_exists(int(pid))], promised())
    else:
        assert httpx2.get(f"{base_url}/api/v1/sandboxes/{sandbox_id}").json()["code"] == "sandbox_closed"


def test_control_c_stops_the_run_and_not_the_sandbox(base_url: str | None):
    with program(INTERRUPTED, base_url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "free\n"
        assert process.wait(HANG_S) == 0


# -- servers that refuse -----------------------------------------------------------------------------------


def test_a_missing_server_is_named_with_what_to_do():
    with pytest.raises(NoConnection, match=r"http://127\.0\.0\.1:9 cannot be reached") as caught:
        Sandbox.run_once("1", base_url="http://127.0.0.1:9")
    assert "base_url=None" in caught.value.hint


async def test_a_server_refuses_wrong_tokens_and_does_not_offer_everything(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
):
    right = tokens.create("ana")
    async with serving() as (_, address):
        with pytest.raises(TokenRefused, match="valid token") as caught:
            await AsyncSandbox(base_url=address, token="wrong").open()
        assert "token create" in caught.value.hint
        monkeypatch.setenv("MCP_SANDBOX_TOKEN", right)
        async with AsyncSandbox(base_url=address) as box:
            assert (await box.run("print(1)")).output == "1\n"
            with pytest.raises(NotOffered, match=r"does not offer POST .*/fork") as missing:
                await box.fork()
            assert "advanced" in missing.value.hint
