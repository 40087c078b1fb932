"""Shell commands in machines of every driver, and attempts to install packages."""

import pytest

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
