"""The shell that is started ahead of the next command, through a real agent."""

from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import WarmUp
from tests.functional.guest_harness import agent_client, command, run
from tests.waiting import HANG_S

# Finds the shell by its arguments and prints its pid, as soon as it waits.
FIND = """
import os, time
def spare():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file, open(f"/proc/{pid}/stat") as stat:
                if b"read -r -N 1" in file.read() and " S " in stat.read():
                    return int(pid)
        except OSError:
            pass
while not (found := spare()):
    time.sleep(0.01)
"""


@pytest.fixture
async def machine() -> AsyncIterator[AgentClient]:
    with anyio.fail_after(HANG_S):
        async with agent_client(WarmUp("python")) as client:
            await run(client, FIND)  # the warm-up has run a command
            yield client


async def found(client: AgentClient) -> int:
    return int((await run(client, f"{FIND}\nprint(found)")).stdout)


async def test_it_runs_the_next_command_and_another_one_takes_its_place(machine: AgentClient):
    pids = [await found(machine)]
    for _ in range(3):
        assert (await command(machine, "echo $$")).stdout == f"{pids[-1]}\n"
        pids.append(await found(machine))
    assert len(set(pids)) == len(pids)


async def test_it_begins_with_the_session_of_the_last_command(machine: AgentClient):
    await command(machine, "mkdir -p 'a b'; cd 'a b'; export X=1; unset LANG")
    await found(machine)
    result = await command(machine, 'echo "$PWD $X ${LANG-none} $SECONDS"; cat')
    assert (result.stdout, result.stderr) == ("/workspace/a b 1 none 0\n", "")


async def test_it_has_the_files_that_a_shell_of_its_own_has(machine: AgentClient):
    await found(machine)
    ahead = (await command(machine, "echo /proc/self/fd/*")).stdout
    assert ahead == (await command(machine, "echo /proc/self/fd/*", stdin="given")).stdout
    assert "/fd/9" in ahead


@pytest.mark.parametrize("deed", ["os.kill(found, 9)", "os.kill(found, 19)", "os.kill(found, 15)"])
async def test_a_command_runs_if_code_has_ended_or_stopped_it(machine: AgentClient, deed: str):
    await run(machine, f"{FIND}\n{deed}")
    result = await command(machine, "echo alive; exit 3")
    assert (result.stdout, result.finished.exit_code) == ("alive\n", 3)


async def test_input_goes_to_a_command_that_another_shell_runs(machine: AgentClient):
    pid = await found(machine)
    result = await command(machine, "cat; echo $$", stdin="given ")
    assert result.stdout.startswith("given ")
    assert result.stdout != f"given {pid}\n"


async def test_a_machine_is_at_rest_while_it_waits_but_not_while_it_runs_a_command(machine: AgentClient):
    await found(machine)
    assert await machine.at_rest()
    await command(machine, "sleep 1000 & exec sleep 0", keep_processes=True)
    assert not await machine.at_rest()


async def test_it_is_not_ended_with_a_run_that_leaves_processes(machine: AgentClient):
    pid = await found(machine)
    result = await run(machine, "import os; os.system('setsid sleep 1000 >/dev/null &')")
    assert "left running were ended: 1" in result.stderr
    assert await found(machine) == pid


async def test_what_its_command_leaves_running_is_ended(machine: AgentClient):
    await found(machine)
    result = await command(machine, "setsid sleep 1000 & echo $!")
    assert "left running were ended: 1" in result.stderr
    left = int(result.stdout)
    assert (await run(machine, f"import os; print(os.path.exists('/proc/{left}'))")).stdout == "False\n"


@pytest.mark.parametrize("cwd", ["closed", "/workspace/closed"])
async def test_a_directory_that_cannot_be_entered_costs_no_variables(machine: AgentClient, cwd: str):
    await command(machine, "mkdir closed; chmod 600 closed; export X=1")
    await found(machine)
    result = await command(machine, "true", cwd=cwd)
    if result.finished.exit_code == 0:
        pytest.skip("this user may enter every directory")
    assert "could not be started" in result.stderr
    await found(machine)
    assert (await command(machine, 'echo "$X ${PATH:+path}"; rmdir closed')).stdout == "1 path\n"
