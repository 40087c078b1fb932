"""What hostile code can do to its own machine, beyond the cases of test_selftest_cases.py."""

import pytest

from guest.protocol import MAX_LISTING
from mcp_sandbox.commands.selftest.bombs import COUNT_BOMBS, FORK_BOMB
from tests.functional.machines import Clone, only

pytestmark = pytest.mark.vm

VARIABLES = "print(*(line.split('=')[0] for line in open('/proc/1/environ').read().split('\\0')))"


@only("gvisor")
async def test_gvisor_shows_only_the_names_of_harmless_variables_of_the_agent(shared: Clone):
    """It shows the agent's environment to all users. That is the same in every machine."""
    names = (await shared.run(VARIABLES)).out.split()
    assert set(names) == {"HOME", "LANG", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}


@only("qemu", "bubblewrap")  # in gVisor a fork copies memory: the bomb ends for that, sometimes with its machine
async def test_a_fork_bomb_left_behind_ends_when_the_next_command_needs_room(clone: Clone):
    await clone.agent.write("/workspace/bomb.py", FORK_BOMB.encode())
    full = "set -- /proc/[0-9]*; [ $# -gt 150 ]"  # without a process, for which there is no room
    await clone.command(f"python3 bomb.py & until {full}; do :; done")
    ran = await clone.command("/bin/echo runs")
    assert ran.out == "runs"
    assert "full of processes" in ran.stderr.head
    assert (await clone.command(COUNT_BOMBS)).out == "0"


async def test_code_cannot_make_a_run_or_a_listing_long(clone: Clone):
    """The deepest paths and the most files that Linux allows."""
    ran = await clone.run(
        "import os\n"
        "os.chdir('/tmp/outputs')\n"
        "for name in range(600): open(f'{name:03}' + 'n' * 200, 'w').close()\n"
        "while len(os.getcwd()) < 3800:\n"
        "    os.mkdir('d' * 200); os.chdir('d' * 200); open('f' * 60, 'w').close()"
    )
    assert ran.end.status == "ok"
    assert not ran.end.artifacts_complete
    seen, truncated = 0, True
    while truncated:
        page = await clone.agent.list("/tmp/outputs", recursive=True, max_entries=10_000, skip=seen)
        assert sum(len(entry.path) for entry in page.entries) <= MAX_LISTING
        assert page.entries
        seen, truncated = seen + len(page.entries), page.truncated
    assert seen > 600
