"""The commands that use a server, against a real one: sandboxes, files, runs and their output."""

import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx2
import pytest

from mcp_sandbox.accounts.tokens import Tokens
from tests.functional.test_http_server import serving, tokens
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

__all__ = ["tokens"]

FAILS = """import sys
open('/tmp/outputs/made', 'w').write('1')
print('out')
print('err', file=sys.stderr)
sys.exit(5)
"""
WAITS = """import os, time
print('one', flush=True)
while not os.path.exists('go'):
    time.sleep(0.05)
print('two')
exit(3)
"""


class Result(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Terminal:
    """A user who has a server."""

    url: str

    async def command(self, *arguments: str, token: str | None = None) -> Result:
        """Run a command on the server."""
        environment = {**os.environ, "COLUMNS": "200"} | ({"MCP_SANDBOX_TOKEN": token} if token else {})
        words = [sys.executable, "-m", "mcp_sandbox", *arguments, "--url", self.url]
        done = await anyio.run_process(words, check=False, env=environment)
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    async def output(self, *arguments: str, token: str | None = None) -> str:
        """Run a command that has to succeed, and return what it prints."""
        result = await self.command(*arguments, token=token)
        assert result.exit_code == 0, result.stderr
        return result.stdout.strip()


@asynccontextmanager
async def terminal(**settings: object) -> AsyncIterator[Terminal]:
    async with serving(**settings) as (_, address):
        with anyio.fail_after(HANG_S):
            yield Terminal(address)


async def test_a_sandbox_is_created_listed_shown_and_closed():
    async with terminal() as user:
        box = await user.output("sandbox", "create", "--idle", "60")
        assert re.fullmatch(r"sb-[0-9a-f]+", box)
        assert box in await user.output("sandbox", "list")
        [listed] = json.loads(await user.output("sandbox", "list", "--json"))
        shown = json.loads(await user.output("sandbox", "show", box, "--json"))
        assert (listed["sandbox_id"], shown["sandbox_id"]) == (box, box)
        assert shown["expires_in_s"] <= 60
        assert "python-data-analysis" in await user.output("sandbox", "show", box)
        assert (await user.command("sandbox", "close", box)).stderr == f"{box} is closed.\n"
        assert json.loads(await user.output("sandbox", "list", "--json")) == []
        again = await user.command("sandbox", "show", box)
        assert (again.exit_code, "was closed" in again.stderr) == (1, True)


async def test_a_copy_of_a_sandbox_has_its_variables(tmp_path: Path):
    async with terminal(toolsets="advanced") as user:
        code = tmp_path / "code.py"
        box = await user.output("sandbox", "create")
        code.write_text("x = 41")
        await user.output("run", "--sandbox", box, str(code))
        copy = await user.output("sandbox", "fork", box)
        code.write_text("print(x + 1)")
        assert await user.output("run", "--sandbox", copy, str(code)) == "42"


async def test_a_server_without_forks_says_that_it_does_not_offer_them():
    async with terminal() as user:
        box = await user.output("sandbox", "create")
        refused = await user.command("sandbox", "fork", box)
        assert refused.exit_code == 1
        assert "does not offer this. Its setting `toolsets`" in refused.stderr


async def test_files_and_directories_are_copied_both_ways(tmp_path: Path):
    folder, data = tmp_path / "data", bytes(range(256)) * 40_000
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "large.bin").write_bytes(data)
    (folder / "empty").touch()
    async with terminal() as user:
        box = await user.output("sandbox", "create")
        await user.output("cp", str(folder), f"{box}:/tmp/in")
        await user.output("cp", f"{box}:/tmp/in", str(tmp_path / "back"))
        await user.output("cp", str(folder / "empty"), f"{box}:")  # into the workspace
        await user.output("cp", f"{box}:empty", str(tmp_path / "file"))
        missing = await user.command("cp", f"{box}:missing", str(tmp_path / "none"))
    assert (tmp_path / "back" / "deep" / "large.bin").read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "back").rglob("*")) == ["deep", "empty", "large.bin"]
    assert (tmp_path / "file").read_bytes() == b""
    assert (missing.exit_code, "/workspace/missing does not exist" in missing.stderr) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "data", "file"]  # no half-written file


async def test_a_run_on_a_server_prints_its_output_and_returns_its_exit_code(tmp_path: Path):
    code = tmp_path / "code.py"
    code.write_text(FAILS)
    async with terminal() as user:
        result = await user.command("run", str(code), "--save", str(tmp_path / "saved"))
        assert (result.exit_code, result.stdout) == (5, "out\n")
        assert "err" in result.stderr
        assert (tmp_path / "saved" / "made").read_text() == "1"
        assert json.loads(await user.output("sandbox", "list", "--json")) == []


@pytest.mark.parametrize("where", ["server", "own process"])
async def test_a_run_gets_what_is_typed_while_it_runs(tmp_path: Path, where: str):
    code = tmp_path / "code.py"
    code.write_text("print('name?', flush=True)\nprint('hello', input())\nimport sys\nprint(len(sys.stdin.read()))")
    async with terminal() as user:
        more = ["--url", user.url] if where == "server" else []
        async with await anyio.open_process(
            [sys.executable, "-m", "mcp_sandbox", "run", "-i", str(code), *more]
        ) as run:
            assert run.stdin
            assert run.stdout
            assert await run.stdout.receive() == b"name?\n"
            await run.stdin.send(b"you\n")
            assert await run.stdout.receive() == b"hello you\n"
            await run.stdin.send(bytes(300_000))
            await run.stdin.aclose()
            assert await run.stdout.receive() == b"300000\n"
            assert await run.wait() == 0


async def test_the_log_of_a_run_is_followed_until_it_ends():
    async with terminal() as user, httpx2.AsyncClient(timeout=HANG_S) as http:
        box = await user.output("sandbox", "create")
        place = f"{user.url.removesuffix('/mcp')}/api/v1/sandboxes/{box}"
        run = (await http.post(f"{place}/runs", json={"code": WAITS, "background": True})).json()["run_id"]
        followed: list[Result] = []

        async def follow() -> None:
            followed.append(await user.command("logs", "-f", box, run))  # named: it may be over already

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            while "one" not in await user.output("logs", box):
                pass
            await http.put(f"{place}/files/content?path=go")
        assert (followed[0].stdout, followed[0].exit_code) == ("one\ntwo\n", 3)
        assert await user.output("logs", box, run) == "one\ntwo"
        idle = await user.command("logs", box)
        assert (idle.exit_code, "No run is active" in idle.stderr) == (1, True)


async def test_a_server_with_tokens_asks_for_one(tokens: Tokens):
    token = tokens.create("ana")
    async with terminal() as user:
        refused = await user.command("sandbox", "create")
        assert (refused.exit_code, "MCP_SANDBOX_TOKEN" in refused.stderr) == (1, True)
        assert re.fullmatch(r"sb-[0-9a-f]+", await user.output("sandbox", "create", token=token))
