"""What hostile code can do to its own machine, beyond the cases of test_selftest_cases.py."""

import json

import pytest
from mcp.client import Client

from guest.errors import GuestError
from guest.protocol import MAX_LISTING
from mcp_sandbox.commands.selftest.bombs import COUNT_BOMBS, FORK_BOMB
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import create_server
from tests.functional.machines import Clone, Machines, Ran, only
from tests.functional.mcp_client import call, data_of, text_of

pytestmark = pytest.mark.vm

SLACK = 1024  # characters of an answer besides its entries

VARIABLES = "print(*(line.split('=')[0] for line in open('/proc/1/environ').read().split('\\0')))"


@only("gvisor")
async def test_gvisor_shows_only_the_names_of_harmless_variables_of_the_agent(shared: Clone):
    """It shows the agent's environment to all users. That is the same in every machine."""
    names = (await shared.run(VARIABLES)).out.split()
    assert set(names) == {"HOME", "LANG", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}


async def test_requests_beyond_all_bounds_are_errors_or_done_and_the_machine_goes_on(shared: Clone):
    with pytest.raises(GuestError):
        await shared.agent.read("/etc/passwd", offset=2**63, limit=1)
    await shared.agent.write(f"/workspace/{'d/' * 1300}file", b"deeper than Python recurses")
    assert (await shared.command("rm -r /workspace/d && echo fine")).out == "fine"
    assert (await shared.run("print('fine')")).out == "fine"


DAEMON = """
import os, pathlib, time
parent = os.fork()
if parent == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("/workspace/pid").write_text(str(os.getpid()))
        os.rename("/workspace/pid", "/workspace/daemon")
        while True: pass
    os._exit(0)
os.waitpid(parent, 0)
while not os.path.exists("/workspace/daemon"): time.sleep(0.01)
print("on", flush=True)
"""
ALIVE = "test -d /proc/$(cat daemon) && echo alive; rm daemon"


@pytest.mark.rights
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_daemon_that_code_starts_ends_with_its_run(clone: Clone, stopped: bool):
    if stopped:
        ran = await clone.run(f"{DAEMON}\nwhile True: pass", stop_after_s=10)
        assert (ran.end.status, ran.end.state) == ("interrupted", "kept")
    else:
        assert "left running were ended: 1." in (await clone.run(DAEMON)).stderr.head
    assert (await clone.command(ALIVE)).out == ""


@pytest.mark.rights
async def test_a_daemon_that_a_command_starts_ends_with_it_unless_it_was_asked_to_stay(clone: Clone):
    await clone.agent.write("/workspace/daemon.py", DAEMON.encode())
    assert "left running were ended: 1." in (await clone.command("python3 daemon.py")).stderr.head
    assert (await clone.command(ALIVE)).out == ""
    assert (await clone.command("python3 daemon.py", keep_processes=True)).out == "on"
    assert (await clone.command(ALIVE)).out == "alive"


@pytest.mark.rights
async def test_a_fork_bomb_left_behind_ends_when_the_next_command_needs_room(machines: Machines, clone: Clone):
    await clone.agent.write("/workspace/bomb.py", FORK_BOMB.encode())
    gvisor = machines.host.driver.name == "gvisor"
    full = f"set -- /proc/[0-9]*; [ $# -gt {120 if gvisor else 150} ]"  # without a process, for which there is no room
    bomb = await clone.command(f"python3 bomb.py & until {full}; do :; done", keep_processes=True)
    ran = await clone.command("/bin/echo runs")
    assert ran.out == "runs"
    # In gVisor a fork copies memory: the bomb may end for that first.
    assert "full of processes" in ran.stderr.head or (gvisor and over_memory(bomb, ran))
    assert (await clone.command(COUNT_BOMBS)).out == "0"


def over_memory(bomb: Ran, after: Ran) -> bool:
    """Whether a bomb was ended in its own run, or later, because it took too much memory."""
    ended = bomb.end.error is not None and bomb.end.error.name == "MemoryLimitExceeded"
    return ended or any("used more than its" in ran.stderr.head for ran in (bomb, after))


# The deepest paths and the most files that Linux and a run allow.
MANY_FILES = """
import os
os.chdir('/tmp/outputs')
for name in range(600): open(f'{name:03}' + 'n' * 200, 'w').close()
while len(os.getcwd()) < 3800:
    os.mkdir('d' * 200); os.chdir('d' * 200); open('f' * 60, 'w').close()
"""


async def test_code_cannot_make_a_run_or_a_listing_long(clone: Clone):
    ran = await clone.run(MANY_FILES)
    assert ran.end.status == "ok"
    assert not ran.end.artifacts_complete
    seen, truncated = 0, True
    while truncated:
        page = await clone.agent.list("/tmp/outputs", recursive=True, max_entries=10_000, skip=seen)
        assert sum(len(entry.path) for entry in page.entries) <= MAX_LISTING
        assert page.entries
        seen, truncated = seen + len(page.entries), page.truncated
    assert seen > 600


@pytest.mark.parametrize("tool", ["list_artifacts", "list_files"])
async def test_no_answer_to_a_client_is_long_and_all_pages_together_are_complete(machines: Machines, tool: str):
    settings = machines.host.settings
    server = create_server(settings, "", lambda: SandboxService(machines.provider(), settings))
    arguments = {"list_artifacts": {}, "list_files": {"path": "/tmp/outputs", "recursive": True}}[tool]
    async with Client(server) as client:
        box = (await data_of(client, "create_sandbox"))["sandbox_id"]
        await call(client, "run_code", code=MANY_FILES, sandbox_id=box)
        seen, offset = 0, 0
        while offset is not None:
            answer = await call(client, tool, sandbox_id=box, offset=offset, **arguments)
            assert len(text_of(answer)) <= settings.output.page_bytes + SLACK
            assert len(json.dumps(answer.structured_content)) <= settings.output.page_bytes + SLACK
            content = answer.structured_content or {}
            seen += len(content["artifacts" if tool == "list_artifacts" else "entries"])
            offset = content["next_offset"]
    assert seen > 600
