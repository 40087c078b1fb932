"""Shell commands through a real agent, with and without a Python kernel."""

import sys
from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, Event, Identity, Output, RunCode, WarmUp
from guest.errors import RequestRefused
from tests.functional.guest_harness import SEPARATE_USER, Result, agent_client, command, run
from tests.waiting import HANG_S

LIMIT_S = HANG_S
ONLY_SHELL = pytest.mark.parametrize("machine", ["shell"], indirect=True)
ONLY_PYTHON = pytest.mark.parametrize("machine", ["python"], indirect=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["shell", "python"])
async def machine(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[AgentClient]:
    """One machine with a Python kernel, one without a kernel."""
    async with agent_client(WarmUp(request.param)) as client:
        yield client


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    with anyio.fail_after(LIMIT_S):
        yield


async def stopped(client: AgentClient, line: str, grace_s: float) -> Result:
    """Stop a command after its first output."""
    async with client.run(RunCode(line, kind="command", grace_s=grace_s)) as running:
        events: list[Event] = []
        async for event in running:
            if isinstance(event, Output) and not events:
                await running.stop()
            events.append(event)
        return Result(events)


async def test_a_command_has_separate_streams_and_an_exit_code(machine):
    result = await command(machine, "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert (result.finished.status, result.finished.exit_code, result.finished.state) == ("exited", 3, "kept")
    result = await command(machine, "true")
    assert (result.finished.status, result.finished.exit_code) == ("ok", 0)


async def test_directory_and_exported_variables_last(machine):
    await command(machine, "mkdir -p deep/down; cd deep/down; export GREETING='good day'")
    assert (await command(machine, 'echo "$GREETING from $PWD"')).stdout == "good day from /workspace/deep/down\n"
    result = await command(machine, 'echo "$GREETING from $PWD"', cwd="..", env={"GREETING": "hi"})
    assert result.stdout == "hi from /workspace/deep\n"
    assert (await command(machine, "pwd; cd /workspace")).stdout == "/workspace/deep/down\n"


async def test_a_line_that_is_one_program_has_no_shell_above_it(machine):
    alone = (await command(machine, "grep PPid /proc/self/status")).stdout
    below = (await command(machine, "grep PPid /proc/self/status; true")).stdout
    again = (await command(machine, "grep PPid /proc/self/status > /workspace/parent")).stdout
    assert alone == (await command(machine, "cat /workspace/parent; rm /workspace/parent")).stdout != below
    assert again == ""


async def test_a_line_that_is_one_program_uses_the_session_and_leaves_it_as_it_is(machine):
    await command(machine, "mkdir -p deep; cd deep; export GREETING='good day'")
    environment = (await command(machine, "cat /proc/self/environ")).stdout.split("\0")
    assert {"GREETING=good day", "PWD=/workspace/deep"} <= {*environment}
    environment = (await command(machine, "cat /proc/self/environ", env={"GREETING": "hi"})).stdout.split("\0")
    assert "GREETING=hi" in environment
    assert (
        await command(machine, 'echo "$GREETING from $PWD"; cd /workspace')
    ).stdout == "good day from /workspace/deep\n"


async def test_a_program_is_found_where_the_session_looks_for_it(machine):
    await command(
        machine, "mkdir -p own; printf '#!/bin/sh\\necho own' > own/ls; chmod +x own/ls; export PATH=$PWD/own:$PATH"
    )
    assert (await command(machine, "ls -la")).stdout == "own\n"
    await command(machine, "export PATH=${PATH#*:}; rm -r own")
    assert (await command(machine, "ls -d /workspace")).stdout == "/workspace\n"


async def test_a_program_that_fails_or_is_not_there_says_so(machine):
    result = await command(machine, "ls /no/such/file")
    assert (result.finished.status, result.finished.exit_code) == ("exited", 2)
    assert "No such file" in result.stderr
    result = await command(machine, "no-such-program -x")
    assert (result.finished.exit_code, result.stderr) == (127, "sh: line 1: no-such-program: command not found\n")


async def test_a_program_may_start_a_session_and_does_not_inherit_orphans(machine):
    code = "import os; os.setsid(); os.system('sleep 0 &'); os.wait()"
    result = await command(machine, f'{sys.executable} -c "{code}"')
    assert "ChildProcessError" in result.stderr, result.stderr


async def test_a_command_killed_by_a_signal_leaves_the_session_unchanged(machine):
    result = await command(machine, "cd /; kill -SEGV $$")
    assert (result.finished.status, result.finished.signal, result.finished.state) == ("killed", "SIGSEGV", "kept")
    assert (await command(machine, "pwd")).stdout == "/workspace\n"


async def test_a_session_whose_directory_is_gone_returns_to_the_workspace_with_a_note(machine):
    await command(machine, "mkdir gone; cd gone; rmdir ../gone")
    result = await command(machine, "pwd")
    assert result.stdout == "/workspace\n"
    assert "/workspace/gone: No such file or directory" in result.stderr


async def test_a_command_reads_its_stdin_which_is_empty_by_default(machine):
    assert (await command(machine, "cat; echo .", stdin="first\nlast ä\n")).stdout == "first\nlast ä\n.\n"
    assert (await command(machine, "cat; echo .")).stdout == ".\n"


async def test_a_command_is_interrupted_when_it_is_stopped(machine):
    # A busy loop: a shell that has just begun to wait for a program may miss an interrupt, as in any terminal.
    line = "cd /; trap 'echo caught; exit' INT; echo begun; while true; do :; done"
    result = await stopped(machine, line, LIMIT_S)
    assert result.stdout == "begun\ncaught\n"
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert (await command(machine, "pwd")).stdout == "/workspace\n"


async def test_a_command_that_ignores_the_interrupt_is_killed_with_its_process_group(machine):
    result = await stopped(machine, "trap '' INT; sleep 1000 & echo $!; sleep 1000", 0.1)
    assert (result.finished.status, result.finished.signal) == ("interrupted", "SIGKILL")
    # A killed process ends when it is scheduled next, and has a directory in /proc until it has been reaped.
    await command(machine, f"while grep -qs '^State:.[^Z]' /proc/{result.stdout.strip()}/status; do :; done")


async def running(client: AgentClient, program: str) -> list[str]:
    """Return the first arguments of all processes that run a program."""
    listing = (await command(client, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'; true")).stdout.split("\n")
    return sorted(listing[place + 1] for place, word in enumerate(listing) if word == program)


ESCAPES = "setsid sleep 1001 & (setsid sleep 1002 &); (sleep 1003 &);"


@pytest.mark.parametrize("end", ["sleep 1004", "trap 'exit' INT; while :; do :; done", "trap '' INT; sleep 1004"])
async def test_a_stopped_command_leaves_no_process_in_any_session(machine, end):
    await command(machine, "sleep 1000 & setsid sleep 999 &", keep_processes=True)
    result = await stopped(machine, f"{ESCAPES} until [ $(pgrep -cx sleep) = 5 ]; do :; done; echo on; {end}", 0.5)
    assert result.finished.status == "interrupted"
    assert await running(machine, "sleep") == ["1000", "999"], "processes of an earlier command go on"
    await command(machine, "pkill -x sleep")


THREE_LEFT = f"{ESCAPES} until [ $(pgrep -cx sleep) = 3 ]; do :; done"


async def test_what_a_command_leaves_running_ends_with_it_in_any_session(machine):
    result = await command(machine, THREE_LEFT)
    assert result.finished.status == "ok"
    assert "processes that this run left running were ended: 3." in result.stderr
    assert await running(machine, "sleep") == []


async def test_what_a_command_leaves_running_stays_if_that_was_asked_for(machine):
    assert (await command(machine, THREE_LEFT, keep_processes=True)).stderr == ""
    assert (await command(machine, "sleep 1000 & echo more")).stdout == "more\n"
    assert await running(machine, "sleep") == ["1001", "1002", "1003"]
    await command(machine, "pkill -x sleep")


BOMB = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        if not os.fork(): os.setsid()
    except OSError:
        if sys.argv[1:]: os.kill(-1, signal.SIGCONT)
"""


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
@pytest.mark.parametrize("fights", ["", "fights"])
async def test_a_fork_bomb_in_a_command_ends_with_it(machine, fights):
    await machine.write("/workspace/bomb.py", BOMB.encode())
    result = await stopped(machine, f"echo on; exec {sys.executable} bomb.py {fights}", 0.2)
    assert result.finished.status == "interrupted"
    assert await running(machine, "bomb.py") == []


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_a_fork_bomb_left_behind_does_not_prevent_the_next_command(machine):
    await machine.write("/workspace/bomb.py", BOMB.encode())
    full = "set -- /proc/[0-9]*; [ $# -gt 150 ]"  # without a process, for which there is no room
    await command(machine, f"{sys.executable} bomb.py & until {full}; do :; done", keep_processes=True)
    result = await command(machine, "ls /proc >/dev/null && echo runs")
    assert result.stdout == "runs\n"
    assert "full of processes" in result.stderr
    assert await running(machine, "bomb.py") == []


async def test_the_output_of_a_kept_process_comes_with_the_next_command(machine):
    line = "mkfifo gate said; (read -r line <gate; echo heard $line; echo >said) & echo left"
    await command(machine, line, keep_processes=True)
    result = await command(machine, "echo it >gate; read -r _ <said; rm gate said")
    assert result.stdout == "heard it\n"


async def result_of(client: AgentClient, request: RunCode) -> Result:
    async with client.run(request) as events:
        return Result([event async for event in events])


@ONLY_SHELL
@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ("pwd", {"cwd": "nowhere"}, "cwd: /workspace/nowhere: No such file or directory"),
        ("pwd", {"cwd": "/etc/passwd"}, "Not a directory"),
        ("pwd", {"env": {"a b": "c"}}, "names of variables"),
        ("pwd # " + "x" * 200_000, {}, "write it to a file"),
    ],
)
async def test_an_invalid_command_is_refused_and_changes_nothing(machine, line, options, words):
    with pytest.raises(RequestRefused, match=words):
        await command(machine, line, **options)
    assert (await command(machine, "pwd")).stdout == "/workspace\n"


@ONLY_SHELL
async def test_files_left_in_the_outputs_directory_are_artifacts_of_their_command(machine):
    result = await command(machine, "echo 1,2 > /tmp/outputs/table.csv")
    assert [event.path for event in result.events if isinstance(event, Artifact)] == ["/tmp/outputs/table.csv"]
    assert not [event for event in (await command(machine, "true")).events if isinstance(event, Artifact)]


@ONLY_SHELL
async def test_long_output_is_cut_and_complete_in_a_file(machine):
    result = await command(machine, "seq 1 200000")
    output = result.finished.output
    assert output.stdout_spill is not None
    assert result.stdout.endswith("199999\n200000\n")
    assert (await command(machine, f"tail -n 1 {output.stdout_spill}; wc -l < {output.stdout_spill}")).stdout == (
        "200000\n200000\n"
    )


async def test_a_command_has_the_users_privileges_and_nothing_of_the_agents(machine):
    words = (await command(machine, "id -u; ulimit -u; env")).stdout.splitlines()
    if SEPARATE_USER:
        assert words[:2] == ["1000", "160"]
    variables = dict(line.split("=", 1) for line in words[2:])
    assert variables["HOME"] == "/workspace"
    assert "PYTHONDONTWRITEBYTECODE" not in variables
    assert variables["PYTHONPATH"].endswith("/guest/offline")
    opened = (await command(machine, "ls -l /proc/self/fd")).stdout
    assert "session" in opened
    assert "socket:" not in opened
    assert "anon_inode:" not in opened


@ONLY_PYTHON
async def test_a_lease_with_a_network_lets_package_managers_use_it(machine):
    config = "python3 -m pip config list"
    for mode, offline in (("none", True), ("proxy", False), ("none", True)):
        await machine.refresh(Identity("clone", "f" * 32, bytes(32), mode, reseed=False))
        assert ("no-index" in (await command(machine, config)).stdout) is offline


PROXY = "http://127.0.0.1:3128"


async def test_commands_know_the_proxy_while_the_machine_may_use_it(machine):
    await command(machine, "export MINE=1")
    for mode, shown in (("proxy", f"{PROXY} {PROXY} except 1\n"), ("none", "   1\n")) * 2:
        await machine.refresh(Identity("clone", "f" * 32, bytes(32), mode, reseed=False))
        line = 'echo "$https_proxy $HTTP_PROXY ${NO_PROXY:+except} $MINE"'
        assert (await command(machine, line)).stdout == shown


@ONLY_PYTHON
async def test_a_kernel_that_runs_already_knows_the_proxy_while_the_machine_may_use_it(machine):
    for mode, shown in (("proxy", [repr(PROXY)]), ("none", ["''"])):
        await machine.refresh(Identity("clone", "f" * 32, bytes(32), mode, reseed=False))
        assert (await run(machine, "import os; os.environ.get('HTTPS_PROXY', '')")).shown == shown
        await run(machine, "os.kill(os.getpid(), 9)")
        assert (await run(machine, "import os; os.environ.get('HTTPS_PROXY', '')")).shown == shown


@ONLY_SHELL
async def test_a_pipeline_ends_when_its_reader_does(machine):
    assert (await command(machine, "yes | head -n 1")).stdout == "y\n"


@ONLY_PYTHON
async def test_commands_and_code_run_in_separate_processes(machine):
    await run(machine, "kept = 1\nimport os; os.chdir('/tmp')")
    assert (await command(machine, "pwd; cd /")).stdout == "/workspace\n"
    assert (await run(machine, "kept, os.getcwd()")).shown == ["(1, '/tmp')"]
    await command(machine, "cd /workspace")


@ONLY_PYTHON
async def test_a_command_that_kills_the_kernel_reports_lost_state(machine):
    pid = (await run(machine, "import os\nlost = 1\nprint(os.getpid())")).stdout.strip()
    result = await command(machine, f"kill -KILL {pid}; while [ -e /proc/{pid} ]; do :; done; echo on")
    assert (result.stdout, result.finished.status, result.finished.state) == ("on\n", "ok", "lost")
    error = (await run(machine, "lost")).finished.error
    assert error is not None
    assert error.name == "NameError"


@ONLY_SHELL
async def test_in_a_shell_machine_code_is_a_command(machine):
    assert machine.hello.language == "python"  # from before the warm-up
    await run(machine, "export FROM_CODE=1")
    assert (await command(machine, "echo $FROM_CODE")).stdout == "1\n"
    with pytest.raises(RequestRefused, match="shell commands only"):
        await result_of(machine, RunCode("x", kind="invoke", options={}))


async def test_a_shell_machines_warm_up_leaves_files_and_no_session():
    async with agent_client(WarmUp("shell", "cd /tmp; export X=1; echo warm > /workspace/file")) as client:
        assert (await command(client, 'pwd; echo "${X-none}"; cat file')).stdout == "/workspace\nnone\nwarm\n"


async def test_a_failing_warm_up_script_is_reported_with_its_output():
    async with agent_client(None) as client:
        with pytest.raises(RequestRefused, match=r"(?s)no such thing.*'exit_code': 7"):
            await client.warm(WarmUp("shell", "echo no such thing >&2; exit 7"), LIMIT_S)


async def test_a_templates_variables_take_precedence_over_ours():
    env = {"GOPROXY": "direct", "PYTHONPATH": "/tmp", "MINE": "it's"}
    async with agent_client(WarmUp("python", env=env)) as client:
        await client.write("/tmp/ours.py", b"NAME = 'ours'\n")
        assert (await run(client, "import ours; ours.NAME")).shown == ["'ours'"]
        result = await command(client, 'python3 -c "import ours; print(ours.NAME)"; echo $GOPROXY $MINE')
        assert result.stdout == "ours\ndirect it's\n"
