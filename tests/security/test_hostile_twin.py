"""What protects the agent from code of the same user, as in bubblewrap machines, and what does not.

The host does not rely on it: everything from a machine is treated as hostile.
"""

import signal

import pytest

from tests.functional.machines import Clone, only

pytestmark = [pytest.mark.vm, only("bubblewrap")]

SEND_ALL = f"""
import os
sent = 0
for number in range(1, {signal.NSIG}):
    try:
        os.kill(1, number)
        sent += 1
    except OSError:
        pass
print(sent)
"""


async def test_no_signal_from_inside_ends_or_stops_the_agent(shared: Clone):
    """The kernel drops them, because the agent is process 1 of its namespace."""
    assert int((await shared.run(SEND_ALL)).out) > 31
    await shared.agent.ping()
    assert (await shared.run("print('goes on')")).out == "goes on"


async def test_code_may_change_the_agents_files_but_not_the_agent(clone: Clone):
    """Only the start of an agent, and processes with the privileges of code, read them."""
    await clone.run(
        "import os\n"
        "for folder, _, names in os.walk('/run/mcp-sandbox/guest'):\n"
        "    for name in names:\n"
        "        with open(os.path.join(folder, name), 'w') as file: file.write('raise SystemExit')"
    )
    await clone.agent.write("/workspace/file", b"kept")
    assert (await clone.agent.read("/workspace/file", limit=10)).data == b"kept"
    assert (await clone.run("print('goes on')")).out == "goes on"
    await clone.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (await clone.run("print('goes on, too')")).out == "goes on, too"


async def test_code_that_kills_every_process_it_sees_gets_a_new_kernel(clone: Clone):
    for _ in range(2):
        ran = await clone.run("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)")
        assert (ran.end.status, ran.end.state) == ("killed", "lost")
        assert (await clone.run("print('goes on')")).out == "goes on"
