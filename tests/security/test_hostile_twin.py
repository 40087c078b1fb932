"""What protects the agent from code of the same user, as in bubblewrap machines, and what does not.

The host does not rely on it: everything from a machine is treated as hostile.
"""

import signal

import anyio
import pytest

from guest.errors import AgentGone
from tests.functional.machines import Clone, Machines, only
from tests.waiting import promised
from vmm import limits, types
from vmm.hierarchy import Hierarchy

pytestmark = [pytest.mark.vm, pytest.mark.rights, only("bubblewrap")]

HOST_LIMIT_MB = 300
HOARD = "hoard = bytearray(b'x') * (230 << 20)\nwhile True: pass"
FILES = (
    "with open('/workspace/file', 'wb') as file:\n    for _ in range(230): file.write(bytes(1 << 20))\nwhile True: pass"
)
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


WEAKEN_THE_AGENT = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
IOPRIO_SET, IDLE = {"x86_64": 251, "aarch64": 30}[os.uname().machine], 3 << 13
tries = {
    "prlimit": lambda: resource.prlimit(AGENT, resource.RLIMIT_NOFILE, (8, 8)),
    "affinity": lambda: os.sched_setaffinity(AGENT, {0}),
    "scheduler": lambda: os.sched_setscheduler(AGENT, os.SCHED_IDLE, os.sched_param(0)),
    "parameters": lambda: os.sched_setparam(AGENT, os.sched_param(0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, AGENT, 19),
    "group": lambda: os.setpriority(os.PRIO_PGRP, AGENT, 19),
    "user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
}
for name, attempt in tries.items():
    try: attempt()
    except PermissionError: continue
    print(name, "was possible")
if libc.syscall(IOPRIO_SET, 1, AGENT, IDLE) == 0: print("disk priority was possible")
""".replace("AGENT", "1")
LIMIT_ONESELF = """
import os, resource
for pid in (0, os.getpid()):
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (200, 200))
    os.sched_setaffinity(pid, os.sched_getaffinity(pid))
    os.setpriority(os.PRIO_PROCESS, pid, 19)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


async def test_code_can_limit_itself_but_not_the_agent(clone: Clone):
    assert (await clone.run(WEAKEN_THE_AGENT)).out == ""
    assert (await clone.run(LIMIT_ONESELF)).out == "200 200"


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


@pytest.mark.parametrize("greedy", [HOARD, FILES])
async def test_without_cgroups_the_server_ends_a_machine_that_takes_too_much_whatever_its_agent_does(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, greedy: str
):
    """This agent would allow it: the host's limit is the lower one here."""
    monkeypatch.setattr(limits, "detect", lambda: Hierarchy(None, reason="none in this test"))
    monkeypatch.setattr(types, "OVERHEAD_MB", HOST_LIMIT_MB - machines.built.template.machine.memory_mb)
    async with machines.clone() as clone:
        assert (await clone.run("print('fits')")).out == "fits"
        with pytest.raises(AgentGone):
            await clone.run(greedy)
        with anyio.fail_after(promised()):
            assert "exceeded the host's memory limit" in str(await clone.machine.wait())
