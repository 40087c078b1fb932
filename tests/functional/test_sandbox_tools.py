"""The tools over MCP on stdio, with real machines behind them."""

import base64
import json
import os
import re
import signal
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import psutil
import pytest
from mcp import MCPError
from mcp.client import Client
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from mcp_sandbox.commands.common import run_of
from mcp_sandbox.machines.provider import HostFacts
from tests.functional.mcp_client import SERVER, data_of, error_of, server_parameters, text_of
from tests.waiting import HANG_S, assert_soon_empty, promised
from vmm.process_table import own_child

pytestmark = pytest.mark.vm

PNG = b"\x89PNG\r\n\x1a\n"
CHART = """
import matplotlib.pyplot as plt
plt.plot([1, 4, 9, 16])
plt.title("squares")
"""
# Creates its file once it ignores interrupts.
STUBBORN = """
import time
while True:
    try:
        open("begun", "w").close()
        while True: time.sleep(1)
    except BaseException: pass
"""


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the host that the server has opened."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
async def client(in_force: HostFacts, anyio_backend: str, host_dir: Path) -> AsyncIterator[Client]:
    """A client whose server keeps no machine ready, so that every machine belongs to a sandbox."""
    parameters = server_parameters(pool_max=0, host_dirs=f"host={host_dir}:rw")
    async with Client(parameters, read_timeout_seconds=HANG_S) as client:
        yield client


class Box:
    """One sandbox as a client sees it."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self.client = client
        self.id = sandbox_id

    async def call(self, tool: str, **arguments: object) -> CallToolResult:
        return await self.client.call_tool(tool, {"sandbox_id": self.id, **arguments})

    async def run(self, code: str, **arguments: object) -> str:
        return text_of(await self.call("run_code", code=code, **arguments))

    async def has_begun(self) -> None:
        """Wait until the running code has made its file."""
        while "/workspace/begun" not in json.dumps((await self.call("list_files")).structured_content):
            pass


@pytest.fixture
async def box(client: Client) -> AsyncIterator[Box]:
    """A fresh sandbox, the only one of its server."""
    box = Box(client, (await data_of(client, "create_sandbox"))["sandbox_id"])
    yield box
    await box.call("close_sandbox")
    assert (await data_of(client, "list_sandboxes"))["sandboxes"] == []


def machines_of_the_server() -> list[psutil.Process]:
    """The machines of the server that this process has started: its children."""
    server = own_child(*SERVER)
    assert server is not None
    return psutil.Process(server.pid).children()


# -- runs --------------------------------------------------------------------------------------------------


async def test_variables_and_imports_persist_between_runs(box: Box):
    await box.run("import math\nnumbers = [math.factorial(n) for n in range(6)]")
    assert "result:\n153\n" in (await box.run("sum(numbers) - 1")) + "\n"
    assert "stdout:\n120" in await box.run("print(math.factorial(5))")


async def test_a_project_of_several_files_is_written_and_run_with_commands(box: Box):
    await box.call("write_file", path="project/tool/__init__.py", content="NAME = 'tool'\n")
    await box.call(
        "write_file", path="project/tool/__main__.py", content="import sys, tool\nsys.exit(len(tool.NAME))\n"
    )
    text_of(await box.call("run_command", command="cd project; export PYTHONWARNINGS=error"))
    ran = text_of(await box.call("run_command", command="pwd; python3 -m tool; echo it said $?; exit 3"))
    assert "stdout:\n/workspace/project\nit said 4" in ran
    assert "[exited with code 3 · sandbox" in ran
    assert "cwd: /workspace/project/nowhere" in error_of(await box.call("run_command", command="ls", cwd="nowhere"))


async def test_a_table_is_shown_as_text(box: Box):
    code = "import pandas as pd\npd.DataFrame({'city': ['Oslo', 'Rome'], 'people': [709037, 2748109]})"
    shown = await box.run(code)
    assert re.search(r"0\s+Oslo\s+709037\s+1\s+Rome\s+2748109", shown), shown


async def test_a_chart_is_shown_as_an_image_and_kept_as_an_artifact(box: Box):
    result = await box.call("run_code", code=CHART)
    [image] = [block for block in result.content if isinstance(block, ImageContent)]
    assert image.mime_type == "image/png"
    picture = base64.b64decode(image.data)
    assert picture.startswith(PNG)

    listed = await box.call("list_artifacts")
    assert listed.structured_content is not None
    [artifact] = listed.structured_content["artifacts"]
    assert artifact["path"].startswith("/tmp/outputs/")
    assert (artifact["mime_type"], artifact["size"]) == ("image/png", len(picture))

    read = await box.call("read_artifact", path=artifact["path"])
    [again] = read.content
    assert isinstance(again, ImageContent)
    assert base64.b64decode(again.data) == picture

    [contents] = (await box.client.read_resource(artifact["uri"])).contents
    assert isinstance(contents, BlobResourceContents)
    assert contents.mime_type == "image/png"
    assert base64.b64decode(contents.blob) == picture


async def test_a_run_without_a_sandbox_keeps_nothing(client: Client):
    first = text_of(await client.call_tool("run_code", {"code": "left = 1\nprint('once')"}))
    assert "stdout:\nonce" in first
    assert "one-off sandbox, now destroyed" in first
    second = text_of(await client.call_tool("run_code", {"code": "left"}))
    assert "NameError" in second
    await assert_soon_empty(machines_of_the_server, promised())


async def test_results_carry_timings(box: Box, client: Client):
    inside = run_of(await box.call("run_code", code="1")).timings
    assert inside.restore_ms == 0
    fresh = run_of(await client.call_tool("run_code", {"code": "1"})).timings
    assert 0 < fresh.restore_ms <= fresh.total_ms
    assert fresh.queue_ms + fresh.restore_ms + fresh.run_ms <= fresh.total_ms + 1e-6  # they are parts of it


async def test_code_that_fails_is_a_result_with_its_traceback(box: Box):
    shown = await box.run("def divide(a, b):\n    return a / b\ndivide(1, 0)")
    assert "ZeroDivisionError: division by zero" in shown
    assert "divide(1, 0)" in shown


async def test_an_exit_code_is_reported_and_the_state_kept(box: Box):
    await box.run("kept = 'yes'")
    assert "exited with code 3" in await box.run("import sys\nsys.exit(3)")
    assert "'yes'" in await box.run("kept")


async def test_a_process_that_exits_at_once_loses_its_state_and_says_so(box: Box):
    await box.run("gone = 1")
    shown = await box.run("import os\nos._exit(4)")
    assert "exited with code 4" in shown
    assert "variables and imports are lost" in shown
    assert "NameError" in await box.run("gone")


async def test_reading_stdin_does_not_hang(box: Box):
    assert "error" in await box.run("input('name? ')", timeout_s=10)


# -- stopping ----------------------------------------------------------------------------------------------


async def test_a_run_over_its_time_limit_is_interrupted_and_keeps_its_state(box: Box):
    shown = await box.run("kept = 'kept'\nprint('began')\nwhile True: pass", timeout_s=1)
    assert "stopped: time limit of 1 s reached; variables are kept" in shown
    assert "began" in shown
    assert "'kept'" in await box.run("kept")


async def test_a_run_that_cannot_be_interrupted_is_killed_and_the_result_says_that_state_is_lost(box: Box):
    await box.run("gone = 1\nopen('file', 'w').write('kept')")
    shown = await box.run(STUBBORN, timeout_s=1)
    assert "stopped: time limit of 1 s reached" in shown
    assert "variables and imports are lost, files are kept" in shown
    assert "NameError" in await box.run("gone")
    assert "'kept'" in await box.run("open('file').read()")


async def test_a_cancelled_call_interrupts_the_code_and_the_sandbox_stays_usable(box: Box):
    begun = "ticks = 1\nopen('begun', 'w').close()\nwhile True:\n    time.sleep(0.05); ticks += 1"
    await box.run("import time")
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: box.call("run_code", code=begun, timeout_s=600))
            await box.has_begun()
            tasks.cancel_scope.cancel()
        assert "result:\nTrue" in await box.run("seen = ticks\nseen > 0")
        assert "result:\nTrue" in await box.run("time.sleep(0.3)\nticks == seen")


async def test_if_a_cancelled_run_had_to_be_killed_the_next_result_says_that_state_is_lost(box: Box):
    await box.run("gone = 1")
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: box.call("run_code", code=STUBBORN, timeout_s=600))
            await box.has_begun()
            tasks.cancel_scope.cancel()
        assert "lost" in await box.run("1")


async def test_two_runs_in_one_sandbox_take_turns(box: Box):
    shown: list[str] = []

    async def append(letter: str) -> None:
        shown.append(await box.run(f"log = globals().get('log', '') + '{letter}'\nimport time; time.sleep(0.2)\nlog"))

    async with anyio.create_task_group() as tasks:
        for letter in "abc":
            tasks.start_soon(append, letter)
    assert len([text for text in shown if re.search(r"'[abc]{3}'", text)]) == 1


# -- output ------------------------------------------------------------------------------------------------


async def test_long_output_is_cut_and_can_be_read_page_by_page(box: Box):
    lines = 60_000  # more than is sent while code runs
    shown = await box.run(f"for number in range({lines}): print(f'line {{number:05}}')")
    assert len(shown) < 20_000
    assert "line 00000" in shown
    assert f"line {lines - 1:05}" in shown
    assert f"line {lines // 2:05}" not in shown
    note = re.search(r'read_file\(sandbox_id="(\S+)", path="(\S+)", offset=(\d+)\)', shown)
    assert note is not None
    assert note[1] == box.id
    head = shown.partition("stdout:\n")[2].partition("\n[…")[0]

    whole, offset, pages = head.encode()[: int(note[3])], int(note[3]), 0
    while True:
        page = await box.call("read_file", path=note[2], offset=offset)
        text, *paging = [block.text for block in page.content if isinstance(block, TextContent)]
        whole += text.encode()
        pages += 1
        if not paging:
            break
        offset = int(re.findall(r"offset=(\d+)\)", paging[0])[0])
    assert pages > 1
    assert whole.decode().splitlines() == [f"line {number:05}" for number in range(lines)]


async def test_a_flood_of_output_does_not_harm_the_server(box: Box):
    shown = await box.run("while True: print('flood ' * 100)", timeout_s=2)
    assert "time limit of 2 s reached" in shown
    assert "bytes omitted" in shown
    assert len(shown) < 40_000
    assert "'fine'" in await box.run("'fine'")


# -- files -------------------------------------------------------------------------------------------------


async def test_text_files_are_written_and_read_back(box: Box):
    content = "näïve ✓\nline two\n"
    written = await box.call("write_file", path="notes/a.txt", content=content)
    assert written.structured_content == {"path": "/workspace/notes/a.txt", "size": len(content.encode())}
    assert text_of(await box.call("read_file", path="notes/a.txt")) == content
    assert "result:\n'näïve ✓'" in await box.run("open('notes/a.txt').readline().strip()")
    listed = await box.call("list_files", path="notes")
    assert listed.structured_content is not None
    assert [entry["path"] for entry in listed.structured_content["entries"]] == ["/workspace/notes/a.txt"]


async def test_binary_files_are_written_and_read_as_base64_or_a_resource(box: Box):
    data = bytes(range(256)) * 5000
    await box.call("write_file", path="data.bin", content=base64.b64encode(data).decode(), encoding="base64")
    assert "result:\nTrue" in await box.run("open('data.bin', 'rb').read() == bytes(range(256)) * 5000")
    read = await box.call("read_file", path="data.bin")
    [link] = [block for block in read.content if isinstance(block, ResourceLink)]
    assert link.size == len(data)
    whole = await box.call("read_file", path="data.bin", limit=1 << 20)
    rest = await box.call("read_file", path="data.bin", limit=1 << 20, offset=1 << 20)
    assert bytes_of(whole) + bytes_of(rest) == data
    await box.call("write_file", path="data.bin", content="IQ=\n=", encoding="base64", append=True)
    assert bytes_of(await box.call("read_file", path="data.bin", offset=len(data), encoding="base64")) == b"!"
    [contents] = (await box.client.read_resource(link.uri)).contents
    assert isinstance(contents, BlobResourceContents)
    assert base64.b64decode(contents.blob) == data + b"!"


def bytes_of(result: CallToolResult) -> bytes:
    [blob] = [block.resource for block in result.content if isinstance(block, EmbeddedResource)]
    assert isinstance(blob, BlobResourceContents)
    return base64.b64decode(blob.blob)


async def test_a_text_file_is_a_resource_too(box: Box):
    await box.run("open('/tmp/outputs/a b%.csv', 'w').write('x\\n1\\n')")
    listed = await box.call("list_artifacts")
    assert listed.structured_content is not None
    [artifact] = listed.structured_content["artifacts"]
    [contents] = (await box.client.read_resource(artifact["uri"])).contents
    assert isinstance(contents, TextResourceContents)
    assert contents.text == "x\n1\n"
    assert contents.mime_type == "text/csv"


async def test_a_missing_resource_is_an_error(box: Box):
    with pytest.raises(MCPError):
        await box.client.read_resource(f"sandbox://{box.id}/workspace/nothing")
    with pytest.raises(MCPError):
        await box.client.read_resource("sandbox://sb-0000000000000000/workspace/nothing")


async def test_tools_cannot_read_files_that_code_cannot_read(box: Box):
    refused = error_of(await box.call("write_file", path="/etc/hosts", content="x"))
    assert "/etc/hosts may not be accessed: " in refused
    assert "may not write to the directory /etc." in refused or "read-only file system" in refused
    assert "does not exist" in error_of(await box.call("read_file", path="nothing"))


async def test_files_and_directories_are_copied_from_and_to_the_host(box: Box, host_dir: Path):
    data = os.urandom(2_500_000)
    (host_dir / "set" / "sub").mkdir(parents=True)
    (host_dir / "set" / "sub" / "näme").write_bytes(data)
    (host_dir / "set" / "link").symlink_to("/etc/passwd")
    uploaded = (await box.call("upload_file", source="host/set")).structured_content
    assert uploaded is not None
    assert (uploaded["target"], uploaded["skipped"]) == ("/workspace/set.tar", 1)
    text_of(await box.call("run_command", command="mkdir copy && tar -xf set.tar -C copy"))
    text_of(await box.call("download_file", path="copy/sub/näme", target="host/"))
    assert (host_dir / "näme").read_bytes() == data
    text_of(await box.call("download_file", path="copy", target="host/copy.tar"))
    with tarfile.open(host_dir / "copy.tar") as archive:
        assert archive.getnames() == ["sub", "sub/näme"]
    with (host_dir / "huge").open("wb") as file:
        file.truncate(8 << 30)
    assert "disk is full" in error_of(await box.call("upload_file", source="host/huge"))
    refused = error_of(await box.call("download_file", path="copy", target="host/copy.tar"))
    assert "exists already" in refused
    assert {path.name for path in host_dir.iterdir()} == {"set", "näme", "copy.tar", "huge"}
    listed = (await box.call("list_files")).structured_content
    assert listed is not None
    assert [entry["path"] for entry in listed["entries"]] == ["/workspace/copy", "/workspace/set.tar"]


async def test_text_that_looks_like_json_reaches_the_code(box: Box):
    for text in ("[1, 2, 3]", '{"a": 1}', "null"):
        assert f"result:\n{text!r}\n" in await box.run("import sys; sys.stdin.read()", stdin=text)
        assert f"stdout:\n{text}\n" in text_of(await box.call("run_command", command="cat", stdin=text))
    assert "Sandbox 'null' does not exist" in error_of(
        await box.client.call_tool("run_code", {"code": "1", "sandbox_id": "null"})
    )


async def test_a_file_where_a_directory_is_needed_is_named(box: Box):
    await box.call("write_file", path="plain", content="x")
    for tool, path in (("list_files", "plain"), ("read_file", "plain/below"), ("write_file", "plain/below/it")):
        more = {"content": "x"} if tool == "write_file" else {}
        said = error_of(await box.call(tool, path=path, **more))
        assert said.startswith("/workspace/plain is a file, not a directory. ")


# -- ends --------------------------------------------------------------------------------------------------


async def test_a_closed_sandbox_is_gone_and_says_so(client: Client, box: Box):
    [machine] = machines_of_the_server()
    closed = await box.call("close_sandbox")
    assert closed.structured_content == {"sandbox_id": box.id, "closed": True}
    assert not machine.is_running()
    again = await box.call("close_sandbox")
    assert again.structured_content == {"sandbox_id": box.id, "closed": False}
    message = error_of(await box.call("run_code", code="1"))
    assert "was closed" in message
    assert "create_sandbox" in message


async def error_of_a_run(box: Box, end: Callable[[], Awaitable[object]]) -> str:
    """Return the error that a client gets when its sandbox ends during a run."""
    errors: list[str] = []

    async def run() -> None:
        code = "open('begun', 'w').close()\nwhile True: pass"
        errors.append(error_of(await box.call("run_code", code=code, timeout_s=600)))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await box.has_begun()
            await end()
    return errors[0]


async def test_closing_a_sandbox_ends_its_run(box: Box):
    assert "was closed" in await error_of_a_run(box, lambda: box.call("close_sandbox"))


async def test_an_unknown_sandbox_is_an_error_that_says_what_to_do(client: Client):
    for tool, more in {"run_code": {"code": "1"}, "read_file": {"path": "x"}, "close_sandbox": {}}.items():
        message = error_of(await client.call_tool(tool, {"sandbox_id": "sb-0123456789abcdef", **more}))
        assert "does not exist" in message
        assert "create_sandbox" in message


async def test_a_machine_killed_from_outside_is_a_lost_sandbox(client: Client, box: Box):
    await box.run("1")
    [machine] = machines_of_the_server()
    family = [machine, *machine.children(recursive=True)]
    machine.send_signal(signal.SIGKILL)
    await anyio.to_thread.run_sync(psutil.wait_procs, family, HANG_S)  # until the last has ended, code can still run
    message = error_of(await box.call("run_code", code="1"))
    assert "lost its machine" in message
    assert "signal 9" in message
    assert "create_sandbox" in message
    assert "stdout:\nfine" in text_of(await client.call_tool("run_code", {"code": "print('fine')"}))


async def test_killing_a_machine_ends_its_run(box: Box):
    async def kill() -> None:
        [machine] = machines_of_the_server()
        machine.send_signal(signal.SIGKILL)

    error = await error_of_a_run(box, kill)
    assert "lost its machine" in error
    assert "signal 9" in error


async def test_what_a_sandbox_reports_about_itself_is_true(client: Client, box: Box, in_force: HostFacts):
    [view] = (await data_of(client, "list_sandboxes"))["sandboxes"]
    assert view["sandbox_id"] == box.id
    assert view["network"] == "none"
    assert view["isolation"] == in_force.isolation
    assert 0 < view["expires_in_s"] <= 900
    assert f"'{view['working_directory']}'" in await box.run("import os\nos.getcwd()")
