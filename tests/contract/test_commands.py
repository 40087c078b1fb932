"""Shell commands in machines of every driver, and attempts to install packages."""

import pytest

from guest.client.messages import RunKind
from tests.functional.guest_harness import active, send
from tests.functional.machines import Clone

pytestmark = pytest.mark.vm

ADVICE = "add the package to {field} in its template.toml"


async def test_commands_share_a_session_that_does_not_affect_code(clone: Clone):
    await clone.run("kept = 42")
    assert (await clone.command("cd /tmp && export WHO=me && echo here > file")).out == ""
    ran = await clone.command('echo "$WHO in $PWD"; cat file; echo aside >/dev/stderr; id -u')
    assert ran.out == "me in /tmp\nhere\n1000"
    assert ran.stderr.head == "aside\n"
    assert (await clone.run("import os; print(kept, os.getcwd(), os.environ.get('WHO'))")).out == "42 /workspace None"


async def test_stopping_a_command_ends_no_process_that_an_earlier_one_kept(clone: Clone):
    await clone.command("sleep 1000 & echo $! > /workspace/pid", keep_processes=True)
    ran = await clone.command("echo begun; sleep 1000", stop_after_s=0.5)
    assert (ran.end.status, ran.end.state) == ("interrupted", "kept")
    assert (await clone.command("kill -0 $(cat /workspace/pid) && echo alive")).out == "alive"


SERVER = "echo begun; exec python3 -u -m http.server 8000 --bind 127.0.0.1"
COUNT_SLEEPS = "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx sleep || true"
GET = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/served').read().decode())"


async def test_a_server_in_the_background_is_reachable_from_later_commands_and_code(clone: Clone):
    await clone.agent.write("/workspace/served", b"found")
    async with (
        active(clone.agent, SERVER) as server,
        active(clone.agent, "setsid sleep 99 & echo begun; exec sleep 98") as beside,
    ):
        await server.wrote("Serving HTTP")
        assert (await clone.command(f'python3 -c "{GET}"')).out == "found"
        assert (await clone.run(GET)).out == "found"
        await server.run.stop()
        assert (await server.end()).stderr.count("GET /served") == 2
        assert (await clone.command(COUNT_SLEEPS)).out == "2"
        await beside.run.stop()
        await beside.end()
    assert (await clone.command(COUNT_SLEEPS)).out == "0"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("echo begun; while read -r line; do echo got $line; done", "command"),
        ("print('begun')\nprint('got', input())", "code"),
    ],
)
async def test_a_run_reads_input_that_is_sent_while_it_is_active(shared: Clone, code: str, kind: RunKind):
    async with active(shared.agent, code, kind, stdin_open=True) as reader:
        await send(reader.run, "one\n")
        await reader.wrote("got one\n")
        await reader.run.close_stdin()
        assert (await reader.end()).finished.status == "ok"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("pip install nothing", "wheels"),
        ("python3 -m pip install nothing", "wheels"),
        ("apt-get -y install x", "packages"),
    ],
)
async def test_a_command_that_installs_packages_fails_with_advice(shared: Clone, line: str, field: str):
    ran = await shared.command(line)
    assert ran.end.status == "exited"
    assert ran.end.exit_code != 0
    assert ADVICE.format(field=field) in ran.stderr.head


@pytest.mark.parametrize("code", ["%pip install nothing", "!pip install nothing"])
async def test_code_that_installs_packages_gets_advice(shared: Clone, code: str):
    assert ADVICE.format(field="wheels") in (await shared.run(code)).stderr.head
