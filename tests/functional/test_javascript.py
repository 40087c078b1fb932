"""JavaScript through a real agent and its kernel, with this host's Node.js."""

import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, Display, Identity, Output, RunCode, Size, WarmUp
from tests.functional.checkout import REPO
from tests.functional.guest_harness import Result, agent_client, command, run
from tests.waiting import HANG_S


def node_version() -> tuple[int, ...]:
    node = shutil.which("node")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout if node else ""
    return tuple(map(int, re.findall(r"\d+", said)))


VERSION = node_version()
IDENTITY = Identity("clone", "f" * 32, bytes(32))
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(VERSION < (20, 11), reason="this host has no Node.js 20.11 or newer"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client(WarmUp(language="javascript")) as client:
        yield client


@pytest.fixture(autouse=True)
async def limit(anyio_backend: str) -> AsyncIterator[None]:
    with anyio.fail_after(HANG_S):
        yield


async def interrupted(machine: AgentClient, code: str) -> Result:
    """Run code that says when it is busy, and stop it then."""
    async with machine.run(RunCode(code)) as events:
        seen = []
        async for event in events:
            seen.append(event)
            if isinstance(event, Output):
                await events.stop()
        return Result(seen)


async def test_variables_persist_and_may_be_declared_again(machine):
    assert (await run(machine, "const kept = {a: [1, 2]}; kept")).shown == ["{ a: [ 1, 2 ] }"]
    assert (await run(machine, "kept.a.length")).shown == ["2"]
    assert (await run(machine, "const kept = 10n ** 20n; kept")).shown == ["100000000000000000000n"]


async def test_await_works_at_the_top_level_and_a_last_promise_is_awaited(machine):
    assert (await run(machine, "await new Promise((done) => setTimeout(done, 5, 'a'))")).shown == ["'a'"]
    result = await run(machine, "async function main() { await null; console.log('in'); return 3 }\nmain()")
    assert (result.stdout, result.shown) == ("in\n", ["3"])


async def test_a_run_waits_for_its_timers_as_a_script_does(machine):
    assert (await run(machine, "setTimeout(() => console.log('later'), 20)")).stdout == "later\n"


async def test_modules_are_imported_by_statements_and_calls(machine):
    code = "import fs, { readFileSync as read } from 'node:fs';\nimport * as path from 'path';\n"
    assert (await run(machine, f"{code}[fs.readFileSync === read, path.join('a', 'b')]")).shown == ["[ true, 'a/b' ]"]
    assert (await run(machine, "(await import('node:path')).sep + 'import(x)'")).shown == ["'/import(x)'"]


async def test_an_error_has_its_name_and_the_lines_of_the_code(machine):
    result = await run(machine, "function f() {\n  throw new TypeError('boo');\n}\nf()")
    error = result.error
    assert (error.name, error.message) == ("TypeError", "boo")
    assert re.fullmatch(r"TypeError: boo\n +at f \(cell-\d+\.js:2:9\)\n +at cell-\d+\.js:4:1", error.traceback)
    late = await run(machine, "setTimeout(() => { throw new Error('late') }, 1)")
    assert late.error.message == "late"


async def test_exit_ends_the_run_and_keeps_variables(machine):
    await run(machine, "var before = 1")
    result = await run(machine, "console.log('a'); process.exit(3); console.log('b')")
    assert (result.stdout, result.finished.status, result.finished.exit_code) == ("a\n", "exited", 3)
    assert (await run(machine, "before")).shown == ["1"]


@pytest.mark.parametrize(
    "busy",
    [
        "console.log('on'); for (;;);",
        "await null; console.log('on'); for (;;);",
        "setTimeout(() => { console.log('on'); for (;;); }, 1)",
        "console.log('on'); await new Promise(() => {})",
    ],
)
async def test_an_interrupt_keeps_variables_whatever_the_code_does(machine, busy):
    await run(machine, "var before = 'kept'")
    result = await interrupted(machine, busy)
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert (await run(machine, "before")).shown == ["'kept'"]


async def test_standard_input_is_read_in_every_way(machine):
    assert (await run(machine, "require('fs').readFileSync(0, 'utf8')", options={"stdin": "a\n"})).shown == ["'a\\n'"]
    stream = "let all = ''; for await (const part of process.stdin) all += part; all"
    assert (await run(machine, stream, options={"stdin": "bc"})).shown == ["'bc'"]
    assert (await run(machine, stream)).shown == ["''"]


async def test_a_displayed_picture_is_an_artifact(machine):
    result = await run(machine, "display('<svg xmlns=\"http://www.w3.org/2000/svg\"/>', 'image/svg+xml')")
    assert [file.endswith(".svg") for display in result.displays for file in display.files] == [True]


async def test_a_crash_is_told_and_the_next_run_works(machine):
    result = await run(machine, "process.abort()")
    assert (result.finished.status, result.finished.state, result.finished.signal) == ("killed", "lost", "SIGABRT")
    assert (await run(machine, "typeof before")).shown == ["'undefined'"]


@pytest.mark.skipif(VERSION < (22, 13), reason="this host's Node.js cannot strip types; the template's can")
async def test_types_are_stripped(machine):
    code = "interface Point { x: number }\nconst p: Point = { x: 1 };\nconst f = (a?: Point): number => a!.x;\nf(p)"
    assert (await run(machine, code)).shown == ["1"]
    assert (await run(machine, "enum Colour { Red, Green }\nColour.Green")).shown == ["1"]


def kernel_says(script: str) -> list[str]:
    """Run a script with a kernel of its own; returns its lines."""
    start = (
        "import os, signal\nfrom guest.languages.javascript import command\nfrom guest.kernels.hosted import Kernel\n"
    )
    start += "kernel = Kernel(command, '', restarts=True)\nkernel.get_ready()\n"
    process = subprocess.run(
        [sys.executable, "-c", f"{start}{script}\nkernel.close()"],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=HANG_S,
        start_new_session=True,  # the script interrupts its process group, as the agent does
        check=True,
    )
    return process.stdout.splitlines()


def test_an_interrupt_that_came_too_late_does_not_stop_the_next_run():
    script = """
for number in range(1, 4):
    os.killpg(0, signal.SIGINT)
    print(kernel.run(number, "for (const end = Date.now() + 400; Date.now() < end;);", None)[0])
"""
    assert kernel_says(script) == ["{'status': 'ok'}"] * 3


def test_an_interrupt_stops_a_run_before_the_interpreter_listens_for_it():
    stop = "process.kill(0, 'SIGINT'); for (;;);"
    script = f"""
print(kernel.run(1, "{stop}", None)[0]["name"], kernel.run(2, "1", None)[0]["status"])
kernel._reseed()
kernel.get_ready()
print(kernel.run(3, "{stop}", None)[0]["name"], kernel.run(4, "1", None)[0]["status"])
"""
    assert kernel_says(script) == ["Interrupted ok"] * 2


async def test_a_picture_that_cannot_be_saved_is_dropped_and_variables_are_kept(machine):
    await run(machine, "var kept = 5; var { rmSync, writeFileSync } = require('fs')")
    await run(machine, "rmSync('/tmp/outputs', { recursive: true, force: true }); writeFileSync('/tmp/outputs', '')")
    result = await run(machine, "display('<svg/>', 'image/svg+xml'); kept")
    await run(machine, "rmSync('/tmp/outputs')")
    assert result.stderr == "a picture could not be saved in /tmp/outputs: File exists\n"
    assert (result.finished.status, result.finished.output.displays_dropped, result.shown) == ("ok", 1, ["5"])


async def test_a_picture_on_a_full_disk_leaves_no_part_behind(machine):
    await run(machine, "var fs = require('fs')")
    code = (
        "var fill = fs.openSync('/tmp/fill', 'w'); try { for (;;) fs.writeSync(fill, Buffer.alloc(2 ** 20)) } catch {}"
    )
    await run(machine, code)
    result = await run(machine, "display(Buffer.alloc(2 ** 20), 'image/png'); fs.rmSync('/tmp/fill')")
    assert result.stderr == "a picture could not be saved in /tmp/outputs: No space left on device\n"
    left = "fs.existsSync('/tmp/outputs') ? fs.readdirSync('/tmp/outputs').filter(name => name.endsWith('png')) : []"
    assert (await run(machine, left)).shown == ["[]"]


async def test_what_warm_up_code_shows_in_a_restarted_interpreter_is_no_output_of_the_run(anyio_backend):
    warm_up = "var warm = 1; display('<svg/>', 'image/svg+xml'); 'x'.repeat(5000)"
    async with agent_client(WarmUp(language="javascript", code=warm_up)) as client:
        await client.refresh(IDENTITY)
        result = await run(client, "'y'.repeat(warm)", max_display_bytes=100)
        assert [event for event in result.events if isinstance(event, Display | Artifact)] == result.displays
        assert result.shown == ["'y'"]


async def test_warm_up_code_that_fails_in_a_restarted_interpreter_is_an_error_of_the_run(anyio_backend):
    warm_up = "if (require('fs').existsSync('/tmp/fail')) throw new Error('no')"
    async with agent_client(WarmUp(language="javascript", code=warm_up)) as client:
        await command(client, "touch /tmp/fail")
        await client.refresh(IDENTITY)
        result = await run(client, "1")
        assert (result.finished.state, result.error.name) == ("kept", "WarmUpFailed")
        assert result.error.message == "the template's warm-up code failed: Error: no"
        await command(client, "rm /tmp/fail")
        assert (await run(client, "1")).shown == ["1"]


async def test_a_new_size_reaches_an_interpreter_that_keeps_running(anyio_backend):
    limit = "/^Max resident set +(\\d+)/m.exec(require('fs').readFileSync('/proc/self/limits', 'utf8'))[1] / 2 ** 20"
    async with agent_client(WarmUp(language="javascript"), "--memory-mb", "512") as client:
        before = await run(client, limit)
        await client.refresh(replace(IDENTITY, size=Size(memory_mb=256, cpus=1)))
        after = await run(client, limit)
        assert (before.shown, after.shown) == (["480"], ["224"])


async def test_a_machine_that_will_wait_has_its_new_interpreter_ready_before(anyio_backend: str):
    """The pool stops machines, so an interpreter that still starts would go on in the first run."""
    mark = "require('node:fs').appendFileSync('/workspace/warmed', '.')"
    async with agent_client(WarmUp(language="javascript", code=mark)) as client:
        before = (await command(client, "cat /workspace/warmed")).stdout
        await client.refresh(IDENTITY)
        assert (await command(client, "cat /workspace/warmed")).stdout == before  # an owner does not wait for it
        await client.settle(HANG_S)
        assert (await command(client, "cat /workspace/warmed")).stdout == f"{before}."
        result = await run(client, "console.log(typeof _)")  # what it ran once left no value
        assert (result.stdout, result.displays) == ("undefined\n", [])
