"""`mcp-sandbox shell` in a real terminal: size, Ctrl-C, exit code, and what is left when its user goes away."""

import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pexpect
import pytest

from tests.functional.checkout import REPO
from tests.functional.test_cli_server import Terminal as User
from tests.functional.test_http_server import serving
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

PROMPT = r"[#$] "
COUNT = "import glob\nprint('left', sum('sleep' in open(f).read() for f in glob.glob('/proc/[0-9]*/comm')))"

T = TypeVar("T")


@dataclass
class Desk:
    """A user with a server and a sandbox, who opens terminals."""

    user: User
    box: str
    folder: Path

    def command(self) -> str:
        return shlex.join([sys.executable, "-m", "mcp_sandbox", "shell", self.box, "--url", self.user.url])

    def shell(self, command: str | None = None) -> "pexpect.spawn[str]":
        """Run a command in a terminal, and wait for the prompt of a shell in the sandbox."""
        words = ["-c", command or f"exec {self.command()}"]
        child = pexpect.spawn("/bin/sh", words, cwd=str(REPO), dimensions=(30, 100), encoding="utf-8", timeout=HANG_S)
        child.expect(PROMPT)
        return child

    async def run(self, code: str) -> str:
        """Run code in the sandbox's kernel."""
        file = self.folder / "code.py"
        file.write_text(code)
        return await self.user.output("run", "--sandbox", self.box, str(file))

    async def something_sleeps(self) -> None:
        """Wait until a `sleep` runs in the machine."""
        with anyio.fail_after(HANG_S):
            while await self.run(COUNT) == "left 0":
                pass

    async def nothing_sleeps(self) -> None:
        """Wait until no `sleep` runs in the machine."""
        with anyio.fail_after(HANG_S):
            while await self.run(COUNT) != "left 0":
                pass


@asynccontextmanager
async def desk(folder: Path, **settings: object) -> AsyncIterator[Desk]:
    async with serving(**settings) as (_, address):
        user = User(address)
        yield Desk(user, await user.output("sandbox", "create"), folder)


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    return await anyio.to_thread.run_sync(partial(work, *arguments))


def wait_for(child: "pexpect.spawn[str]", typed: str, shown: str) -> None:
    child.sendline(typed)
    child.expect(shown)
    child.expect(PROMPT)


async def test_a_shell_has_a_terminal_that_follows_the_users_and_gives_it_back_unchanged(tmp_path: Path):
    def use(child: "pexpect.spawn[str]") -> int | None:
        wait_for(child, "stty size", "30 100")
        child.setwinsize(40, 120)
        wait_for(child, "until [ \"$(stty size)\" = '40 120' ]; do :; done; echo res''ized", "resized")
        wait_for(child, "seq 1 30000 | md5sum; seq 1 30000; echo al''l", "all")
        child.sendline("exit 7")
        child.expect("code=7")
        child.expect(pexpect.EOF)
        child.close()
        return child.exitstatus

    async with desk(tmp_path) as here:
        before, after = tmp_path / "before", tmp_path / "after"
        child = await in_thread(
            here.shell, f"stty -a > {before}; {here.command()}; echo code=$?; stty -a > {after}; exit 3"
        )
        assert await in_thread(use, child) == 3
        assert after.read_text().replace("rows 40; columns 120", "rows 30; columns 100") == before.read_text()


async def test_ctrl_c_ends_a_program_and_runs_go_on_beside_the_terminal(tmp_path: Path):
    def interrupt(child: "pexpect.spawn[str]") -> None:
        child.sendintr()
        child.expect(PROMPT)
        wait_for(child, "echo st''ill there", "still there")

    async with desk(tmp_path) as here:
        await here.run("x = 41")
        child = await in_thread(here.shell)
        assert await here.run("print(x + 1)") == "42"
        child.sendline("sleep 1000; echo co''de $?")
        await here.something_sleeps()
        await in_thread(interrupt, child)
        assert await here.run("open('made', 'w').write('by the kernel')\nprint(x)") == "41"
        await in_thread(wait_for, child, "cat made", "by the kernel")
        await here.nothing_sleeps()
        await in_thread(child.close)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
async def test_nothing_is_left_in_the_machine_when_the_client_dies(tmp_path: Path, number: signal.Signals):
    async with desk(tmp_path) as here:
        child = await in_thread(here.shell)
        typed = "trap '' HUP; sleep 1000 & setsid sleep 1000 & nohup sleep 1000 >/dev/null & sleep 1 && echo rea''dy"
        await in_thread(wait_for, child, typed, "ready")
        assert await here.run(COUNT) == "left 3"
        child.kill(number)
        await here.nothing_sleeps()
        assert await here.run("print(6 * 7)") == "42"
        await in_thread(child.close)


async def test_a_fork_closes_terminals_and_says_so(tmp_path: Path):
    async with desk(tmp_path, toolsets="advanced") as here:
        child = await in_thread(here.shell)
        await here.user.output("sandbox", "fork", here.box)
        await in_thread(child.expect, "was forked or paused")
        await in_thread(child.expect, pexpect.EOF)
        again = await in_thread(here.shell)
        await in_thread(wait_for, again, "echo ba''ck", "back")
        await in_thread(child.close)
        await in_thread(again.close)


async def test_a_shell_without_a_sandbox_creates_one_and_closes_it(tmp_path: Path):
    def leave(child: "pexpect.spawn[str]") -> int | None:
        child.sendline("exit 4")
        child.expect(pexpect.EOF)
        child.close()
        return child.exitstatus

    async with desk(tmp_path) as here:
        await here.user.command("sandbox", "close", here.box)
        here.box = "--template=python-data-analysis"
        child = await in_thread(here.shell)
        assert await here.user.output("sandbox", "list", "--json") != "[]"
        assert await in_thread(leave, child) == 4
        assert await here.user.output("sandbox", "list", "--json") == "[]"


async def test_a_shell_needs_a_terminal(tmp_path: Path):
    async with desk(tmp_path) as here:
        refused = await here.user.command("shell", here.box)
        assert (refused.exit_code, "is not a terminal" in refused.stderr) == (1, True)
