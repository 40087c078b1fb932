"""Several runs at once through a real agent: commands beside each other and beside the kernel."""

import sys
from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import RunCode, WarmUp
from guest.errors import RequestRefused
from guest.protocol import MAX_COMMANDS
from tests.functional.guest_harness import Active, active, agent_client, command, run, send
from tests.waiting import HANG_S

DETACHED = "setsid sleep 2000 & until [ $(pgrep -cxf 'sleep 2000') = 1 ]; do :; done"
SERVER = f"exec {sys.executable} -u -m http.server 8000 --bind 127.0.0.1"
GET = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/served').read().decode())"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client(WarmUp("python")) as client:
        yield client


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    with anyio.fail_after(HANG_S):
        yield


async def alive(client: AgentClient, what: str) -> bool:
    return (await command(client, f"pgrep -xf '{what}'")).finished.exit_code == 0


async def test_a_server_started_by_a_command_is_reachable_from_later_commands_and_code(machine):
    await machine.write("/workspace/served", b"found")
    async with active(machine, f"echo begun; {SERVER}") as server:
        await server.wrote("Serving HTTP")
        assert (await command(machine, f'{sys.executable} -c "{GET}"')).stdout == "found\n"
        assert (await run(machine, GET)).stdout == "found\n"
        await server.run.stop()
        ended = await server.end()
    assert (ended.finished.status, ended.finished.state) == ("interrupted", "kept")
    assert ended.stderr.count("GET /served") == 2, "each run has its own output"


async def test_commands_end_in_any_order_each_with_its_own_output(machine):
    async with active(machine, "mkfifo a; echo begun; read -r _ <a; echo first") as first:
        async with active(machine, "mkfifo b; echo begun; read -r _ <b; echo second; exit 3") as second:
            await command(machine, "echo >b")
            ended = await second.end()
            assert (ended.stdout, ended.finished.exit_code) == ("begun\nsecond\n", 3)
        await command(machine, "echo >a; rm a b")
        ended = await first.end()
        assert (ended.stdout, ended.finished.status) == ("begun\nfirst\n", "ok")


async def test_code_is_refused_while_other_code_is_active_and_commands_are_not(machine):
    async with active(machine, "import time; print('begun'); time.sleep(1000)", "code") as cell:
        with pytest.raises(RequestRefused) as refusal:
            await run(machine, "1")
        assert refusal.value.code == "busy"
        assert (await command(machine, "echo beside")).stdout == "beside\n"
        await cell.run.stop()
        assert (await cell.end()).finished.state == "kept"


async def test_more_commands_than_a_machine_takes_are_refused(machine):
    async with anyio.create_task_group() as tasks:
        started = [anyio.Event() for _ in range(MAX_COMMANDS)]

        async def wait(begun: anyio.Event) -> None:
            async with active(machine, "echo begun; sleep 1000"):
                begun.set()
                await anyio.sleep_forever()

        for begun in started:
            tasks.start_soon(wait, begun)
        for begun in started:
            await begun.wait()
        with pytest.raises(RequestRefused) as refusal:
            await command(machine, "true")
        assert refusal.value.code == "busy"
        tasks.cancel_scope.cancel()
    assert (await command(machine, "pgrep -xc sleep")).stdout == "0\n"


@pytest.mark.parametrize("first", ["exit 0", "exec sleep 1000"], ids=["which ends", "which is stopped"])
async def test_the_end_of_a_command_spares_the_processes_of_others(machine, first):
    """Both leave processes in sessions of their own."""
    async with active(machine, "setsid sleep 3000 & echo begun; exec sleep 3001") as stays:
        async with active(machine, f"{DETACHED}; echo begun; {first}") as ends:
            if first != "exit 0":
                await ends.run.stop()
            await ends.end()
        assert not await alive(machine, "sleep 2000")
        assert await alive(machine, "sleep 3000")
        await stays.run.stop()
        await stays.end()
    assert not await alive(machine, "sleep 3000")


async def test_the_end_of_a_command_spares_orphans_of_code_and_the_end_of_code_those_of_commands(machine):
    code = "import os, time; os.system('setsid sleep 3000 & (sleep 3001 &)'); print('begun'); time.sleep(1000)"
    async with active(machine, "setsid sleep 4000 & echo begun; exec sleep 4001") as stays:
        async with active(machine, code, "code") as cell:
            await command(machine, "(sleep 2000 &); until pgrep -xf 'sleep 2000'; do :; done")
            assert not await alive(machine, "sleep 2000")
            assert await alive(machine, "sleep 3000")
            assert await alive(machine, "sleep 3001")
            await cell.run.stop()
            await cell.end()
        assert not await alive(machine, "sleep 3000")
        assert not await alive(machine, "sleep 3001")
        assert await alive(machine, "sleep 4000")
        await stays.run.stop()


async def test_processes_that_a_command_keeps_outlive_code_that_was_active_meanwhile(machine):
    async with active(machine, "import time; print('begun'); time.sleep(1000)", "code") as cell:
        await command(machine, DETACHED, keep_processes=True)
        await cell.run.stop()
        await cell.end()
    assert await alive(machine, "sleep 2000")
    await command(machine, "pkill -x sleep")


async def test_a_new_kernel_starts_while_commands_go_on(machine):
    async with active(machine, "mkfifo go; setsid sleep 3000 & echo begun; read -r _ <go; echo on") as stays:
        ended = await run(machine, "import os; lost = 1; os.kill(os.getpid(), 9)")
        assert (ended.finished.status, ended.finished.state) == ("killed", "lost")
        assert (await run(machine, "print('again')")).stdout == "again\n"
        assert await alive(machine, "sleep 3000")
        await command(machine, "echo >go; rm go")
        ended = await stays.end()
        assert (ended.stdout, ended.finished.state) == ("begun\non\n", "kept"), "the code has reported the loss"


async def test_a_lost_kernel_is_reported_by_one_command(machine):
    pid = (await run(machine, "import os; print(os.getpid())")).stdout.strip()
    async with active(machine, "echo begun; exec sleep 1000") as stays:
        ended = await command(machine, f"kill -KILL {pid}; while [ -e /proc/{pid} ]; do :; done")
        assert ended.finished.state == "lost"
        await stays.run.stop()
        assert (await stays.end()).finished.state == "kept"


async def test_the_session_is_that_of_the_command_that_was_started_last(machine):
    async with active(
        machine, "mkfifo go; exec 3<>go; cd /usr; export WHO=old; echo begun; read -r _ <&3; echo $PWD"
    ) as old:
        await command(machine, "cd /tmp; export WHO=new")
        await command(machine, "echo >/workspace/go")
        assert (await old.end()).stdout == "begun\n/usr\n"
    assert (await command(machine, "echo $WHO $PWD; cd /workspace; rm go; unset WHO")).stdout == "new /tmp\n"


async def test_a_file_that_keeps_the_output_of_an_active_run_is_no_artifact_of_another(machine):
    async with active(machine, "echo begun; seq 1 200000; echo flooded; exec sleep 1000", tail_bytes=100) as flood:
        while not (await command(machine, "ls /tmp/outputs")).stdout:
            pass
        assert [type(event).__name__ for event in (await command(machine, "true")).events] == ["Finished"]
        await flood.run.stop()
        assert (await flood.end()).finished.output.stdout_spill


# -- open standard input -----------------------------------------------------------------------------------

ECHO = "print('begun')\nwhile True:\n    line = input()\n    print('got', line)\n"


@pytest.mark.parametrize(
    ("code", "kind"), [("echo begun; while read -r line; do echo got $line; done", "command"), (ECHO, "code")]
)
async def test_a_run_reads_input_that_is_sent_while_it_is_active(machine, code, kind):
    async with active(machine, code, kind, stdin_open=True) as reader:
        for word in ("one", "two"):
            await send(reader.run, f"{word}\n")
            await reader.wrote(f"got {word}\n")
        await reader.run.close_stdin()
        ended = await reader.end()
    assert ended.finished.status == ("ok" if kind == "command" else "error")
    assert kind == "command" or ended.error.name == "EOFError"
    assert await reader.run.write(b"late") == 0
    assert (await command(machine, "cat; ls /tmp/.stdin-* 2>/dev/null | wc -l")).stdout == "0\n"


async def test_input_that_is_closed_at_once_arrives_whole(machine):
    async with machine.run(RunCode("import sys; print(sys.stdin.read())", stdin_open=True)) as running:
        await send(running, "all of it")
        await running.close_stdin()
        assert (await Active(running, []).end()).stdout == "all of it\n"


async def test_no_more_input_is_taken_than_has_room_until_the_run_reads_it(machine):
    async with active(machine, "mkfifo go; echo begun; read -r _ <go; wc -c", stdin_open=True) as reader:
        sent = 0
        with anyio.move_on_after(0.5):
            while True:
                sent += await reader.run.write(bytes(10_000))
        assert sent < 300_000
        await command(machine, "echo >go; rm go")
        await send(reader.run, "x" * 500_000)
        await reader.run.close_stdin()
        assert (await reader.end()).stdout == f"begun\n{sent + 500_000}\n"


async def test_code_that_waits_for_input_can_be_stopped(machine):
    async with active(machine, "print('begun')\ninput()", "code", stdin_open=True) as reader:
        await reader.run.stop()
        ended = await reader.end()
    assert (ended.finished.status, ended.finished.state) == ("interrupted", "kept")
    assert (await run(machine, "input()")).error.name == "EOFError"


# -- memory ------------------------------------------------------------------------------------------------

# Each process stays below the limit that each has.
TAKE = f"{sys.executable} -c \"import time; taken = b'x' * 60_000_000; time.sleep(1000)\""
HOG = f"echo begun; {TAKE} & {TAKE} & {TAKE} & sleep 1000"


async def test_the_command_that_takes_too_much_memory_ends_and_those_beside_it_go_on():
    async with agent_client(WarmUp("shell"), "--memory-mb", "150") as client:
        async with active(client, "echo begun; read -r line; echo $line", stdin_open=True) as beside:
            async with active(client, HOG) as hog:
                ended = await hog.end()
            assert ended.error.name == "MemoryLimitExceeded"
            await send(beside.run, "on\n")
            assert (await beside.end()).stdout == "begun\non\n"
        assert (await command(client, "pgrep -xc sleep")).stdout == "0\n"
