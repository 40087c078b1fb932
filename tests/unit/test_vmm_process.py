"""Processes end with their block and with this process, and start only after their limits are set."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import vmm.process
from vmm.errors import ToolFailed, ToolMissing
from vmm.process import PIPE_BYTES, SHOWN, Confinement, find_tool, run_tool, spawn

PLAIN = Confinement(offline=False)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def runs(pid: int, program: str) -> bool:
    try:
        return program in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_leaving_the_block_kills_and_reaps_the_process():
    with anyio.fail_after(10):
        async with spawn(["sleep", "1000"], confinement=PLAIN) as process:
            assert alive(process.pid)
    assert not alive(process.pid)


async def test_a_cancelled_block_leaves_no_process():
    pid = 0
    with anyio.move_on_after(10) as scope:
        async with spawn(["sleep", "1000"], confinement=PLAIN) as process:
            pid = process.pid
            scope.cancel()
            await anyio.sleep_forever()
    assert pid
    assert not alive(pid)


async def test_children_of_the_process_die_with_it():
    with anyio.fail_after(10):
        async with spawn(["sh", "-c", "sleep 1000 & echo $!; wait"], confinement=PLAIN) as process:
            while not process.tail:
                await anyio.sleep(0)
            child = int(process.tail)
            assert alive(child)
    with anyio.fail_after(5):
        while alive(child):  # until init has reaped the orphan
            await anyio.sleep(0)


async def test_a_process_is_killed_even_if_its_children_cannot_be_found(monkeypatch):
    def look(pid: int) -> list[int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(vmm.process, "children_of", look)
    with anyio.fail_after(10):
        async with spawn(["sleep", "1000"], confinement=PLAIN) as process:
            pid = process.pid
    assert not alive(pid)


async def test_a_failing_block_raises_its_own_error_and_no_exception_group():
    with pytest.raises(ValueError, match="mine"):
        async with spawn(["sleep", "1000"], confinement=PLAIN):
            raise ValueError("mine")


async def test_a_program_starts_only_after_its_limits_are_set(tmp_path):
    started = tmp_path / "started"
    seen: list[bool] = []
    with anyio.fail_after(10):
        async with spawn(
            ["touch", str(started)], confinement=PLAIN, before_start=lambda pid: seen.append(started.exists())
        ) as process:
            assert (await process.wait()).code == 0
    assert seen == [False]
    assert started.exists()


async def test_a_tool_gets_nothing_of_our_environment_but_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    printed: list[str] = []
    await run_tool(["env"], env={"ASKED_FOR": "y"}, on_line=printed.append)
    assert sorted(line.partition("=")[0] for line in printed) == ["ASKED_FOR", "LC_ALL", "PATH"]


async def test_a_process_whose_limits_cannot_be_set_is_killed():
    pids: list[int] = []

    def refuse(pid: int) -> None:
        pids.append(pid)
        raise PermissionError("no such limits")

    with pytest.raises(PermissionError):
        async with spawn(["sleep", "1000"], confinement=PLAIN, before_start=refuse):
            pytest.fail("must not start")
    assert not alive(pids[0])


async def test_a_process_that_ends_before_its_limits_are_set_says_why():
    def too_late(pid: int) -> None:
        raise ProcessLookupError(pid)  # as a cgroup says of a process that is gone

    with anyio.fail_after(10):
        async with spawn(["sh", "-c", "echo reason; exit 3"], confinement=PLAIN, before_start=too_late) as process:
            assert (await process.wait()).code == 3
    assert "reason" in process.tail


async def test_a_process_dies_when_its_parent_is_killed():
    script = (
        "import anyio, sys\n"
        "from vmm.process import Confinement, spawn\n"
        "async def main():\n"
        "    async with spawn(['sleep', '1000'], confinement=Confinement(offline=False)) as process:\n"
        "        print(process.pid, flush=True)\n"
        "        await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
    with anyio.fail_after(5):
        while runs(child, "sleep"):
            await anyio.sleep(0)


async def test_a_confined_process_sees_only_a_loopback_device():
    with anyio.fail_after(10):
        async with spawn(["cat", "/proc/net/dev"], confinement=Confinement()) as process:
            await process.wait()
            interfaces = [line.split(":")[0].strip() for line in process.tail.splitlines() if ":" in line]
    assert interfaces == ["lo"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_confined_process_runs_as_an_unprivileged_user():
    with anyio.fail_after(10):
        async with spawn(["cat", "/proc/self/status"], confinement=Confinement(uid=1_900_000_001)) as process:
            await process.wait()
            status = dict(line.split(":", 1) for line in process.tail.splitlines())
    assert status["Uid"].split() == ["1900000001"] * 4
    assert status["Groups"].split() == []
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"


async def test_a_confined_process_does_not_inherit_our_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    with anyio.fail_after(10):
        async with spawn(["env"], confinement=PLAIN) as process:
            await process.wait()
    names = {line.partition("=")[0] for line in process.tail.splitlines()}
    assert names <= {"PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


async def test_an_exit_has_the_signal_and_the_end_of_the_output():
    with anyio.fail_after(10):
        async with spawn(["sh", "-c", "echo the end; kill -TERM $$"], confinement=PLAIN) as process:
            end = await process.wait()
    assert end.signal == signal.SIGTERM
    assert str(end) == "signal 15: the end"


async def test_much_output_is_read_and_only_its_end_is_kept():
    with anyio.fail_after(20):
        async with spawn(["sh", "-c", "yes chatter | head -c 3000000; echo; echo end"], confinement=PLAIN) as process:
            assert (await process.wait()).code == 0
    assert process.tail.endswith("\nend")
    assert len(process.tail) <= 16 * 1024


async def test_a_failed_tool_raises_an_error_with_its_command_and_output():
    with pytest.raises(ToolFailed, match=r"sh -c 'echo went wrong >&2; exit 3'.*status 3: went wrong"):
        await run_tool(["sh", "-c", "echo went wrong >&2; exit 3"])


async def test_a_missing_tool_raises_an_error_that_says_how_to_install_it():
    with pytest.raises(ToolMissing, match="no-such-tool is not installed; `mcp-sandbox setup` installs it"):
        await run_tool(["no-such-tool"])


async def test_a_tool_outside_an_ordinary_users_path_is_found(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    await run_tool(["mkfs.ext4", "-V"])


async def test_a_tools_output_is_passed_on_in_whole_lines():
    lines: list[str] = []
    await run_tool(["printf", "one\\ntwo\\r\\nthree"], on_line=lines.append)
    assert lines == ["one", "two", "three"]


async def test_a_cancelled_tool_is_killed():
    lines: list[str] = []
    with anyio.fail_after(10), anyio.CancelScope() as scope:

        def cancel(line: str) -> None:
            lines.append(line)
            scope.cancel()

        await run_tool(["sh", "-c", "echo $$; exec sleep 1000"], on_line=cancel)
    assert not alive(int(lines[0]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a directory for another user")
async def test_a_confined_process_can_be_given_a_directory_of_a_private_home(tmp_path):
    home = tmp_path / "home"
    (home / "shared").mkdir(parents=True)
    (home / "shared" / "note").write_text("for you")
    home.chmod(0o700)
    confinement = Confinement(uid=1_900_000_001, show=home / "shared")
    with anyio.fail_after(10):
        async with spawn(["cat", f"{SHOWN}/note"], confinement=confinement) as process:
            assert (await process.wait()).detail == "for you"
    assert not (Path(SHOWN) / "note").exists()


async def test_no_process_has_our_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    await run_tool(["pwd"], on_line=lines.append)
    assert lines == ["/"]
    with vmm.process.probe_child(["pwd"]) as child:
        assert child.communicate()[0] == b"/\n"
    async with spawn(["pwd"], confinement=PLAIN) as process:
        assert (await process.wait()).detail == "/"


async def test_a_process_inherits_no_descriptor_but_those_it_is_given(tmp_path):
    ours = os.open(tmp_path, os.O_RDONLY)
    given = os.open(tmp_path, os.O_RDONLY)
    try:
        listing = ["sh", "-c", "ls /proc/$$/fd"]
        async with spawn(listing, confinement=PLAIN, pass_fds=[given]) as process:
            assert {int(fd) for fd in (await process.wait()).detail.split()} == {0, 1, 2, given}
    finally:
        os.close(ours)
        os.close(given)


@pytest.mark.parametrize("entry", ["", ".", "bin", "node_modules/.bin"])
async def test_no_program_of_the_working_directory_is_run(entry, tmp_path, monkeypatch):
    (tmp_path / entry).mkdir(parents=True, exist_ok=True)
    for name in ("planted-tool", "setpriv", "sh"):
        (tmp_path / entry / name).write_text("#!/bin/sh\necho planted\n")
        (tmp_path / entry / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{entry}{os.pathsep}{os.environ['PATH']}")
    assert find_tool("planted-tool") is None
    lines: list[str] = []
    await run_tool(["sh", "-c", "echo ours"], on_line=lines.append)
    assert lines == ["ours"]
    async with spawn(["sh", "-c", "echo ours"], confinement=PLAIN) as process:
        assert (await process.wait()).detail == "ours"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may have used up the pages for large pipes")
async def test_the_pipes_of_a_machine_take_much_at_once():
    async with spawn(["cat"], confinement=Confinement(), stdio=True) as process:
        for number in (0, 1):
            pipe = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR)
            try:
                assert fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) == PIPE_BYTES
            finally:
                os.close(pipe)
