"""The agent's rehearsal, natively: code that runs before a machine has an owner, and that no owner can notice."""

import json
from typing import Any

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import WarmUp
from guest.errors import RequestRefused
from mcp_sandbox.machines.unique import new_identity
from tests.functional.checkout import REPO
from tests.functional.guest_harness import agent_client, command, run
from tests.waiting import HANG_S

# Does all that a cell of Python can leave behind without meaning to.
REHEARSAL = """
from __future__ import annotations
import json, os, random
import matplotlib.pyplot as plt
import numpy as np

os.environ["REHEARSED"] = "yes"
os.chdir("/tmp")
random.gauss(0, 1), np.random.normal()
left = 1
print(left)
plt.plot([1, 2, 3])
plt.show()
display({1: 2})
plt.figure()
1 + 1
"""
# Prints what code can find out about everything before it. The checkout may lie in /tmp, with more files than a run may
# print. It waits for the shell of the next command, which starts a moment after each new identity.
LOOK = """
import contextlib, gc, json, linecache, os, sys, threading, time, warnings
def files(*folders):
    for folder in folders:
        for at, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if os.path.join(at, name) != CHECKOUT]
            yield from (os.path.join(at, name) for name in names)
def programs():
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{number}/comm") as comm:
            yield comm.read()
while "bash\\n" not in programs():
    time.sleep(0.01)
print(json.dumps({
    "variables": sorted(globals()),
    "last values": [repr(_), repr(__), repr(___)],
    "history": [len(In), len(Out), get_ipython().execution_count],
    "modules": sorted(sys.modules),
    "lines": sorted(name for name in linecache.cache if name.startswith("<cell")),
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "files": sorted(files("/tmp", "/workspace", "/dev/shm")),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "programs": sorted(name for name in programs() if name != "bash\\n"),
    "warnings": [str(filter) for filter in warnings.filters],
    "figures": sys.modules["matplotlib.pyplot"].get_fignums(),
    "garbage": len(gc.garbage),
}))
""".replace("CHECKOUT", repr(str(REPO)))
WARM = WarmUp(rehearsal=REHEARSAL)


async def look(client: AgentClient) -> dict[str, Any]:
    ran = await run(client, LOOK)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


async def rehearse(client: AgentClient) -> None:
    await client.rehearse(HANG_S)
    await client.refresh(new_identity())


@pytest.mark.parametrize("options", [(), ("--one-kernel",)])
async def test_no_code_notices_a_rehearsal(options: tuple[str, ...]):
    with anyio.fail_after(HANG_S):
        async with agent_client(WARM, *options) as plain, agent_client(WARM, *options) as rehearsed:
            await rehearse(rehearsed)
            await rehearse(rehearsed)
            expected = await look(plain)
            assert await look(rehearsed) == expected
    assert "left" not in expected["variables"]
    assert "REHEARSED" not in expected["environment"]
    assert [path for path in expected["files"] if not path.startswith("/tmp/.")] == []


async def test_numbers_of_runs_and_figures_begin_after_a_rehearsal():
    figure = "import matplotlib.pyplot as plt\nprint(plt.figure().number)\nplt.plot([1])\nplt.show()"
    with anyio.fail_after(HANG_S):
        async with agent_client(WARM) as client:
            await rehearse(client)
            ran = await run(client, figure)
            assert ran.stdout == "1\n"
            assert [display.files for display in ran.displays] == [("/tmp/outputs/figure-1.png",)]
            assert "<cell 2>" in (await run(client, "1/0")).error.traceback


async def test_annotations_are_evaluated_after_a_rehearsal_that_imported_the_future():
    with anyio.fail_after(HANG_S):
        async with agent_client(WARM) as client:
            await rehearse(client)
            assert (await run(client, "def f(x: 1 + 1): pass\nf.__annotations__")).shown == ["{'x': 2}"]


async def test_what_a_rehearsal_left_in_generators_is_not_drawn():
    """A generator of normal values keeps every second one, which a new key alone would not change."""
    left = WarmUp(code="import numpy.random", rehearsal="import numpy\nnumpy.random.seed(1)\nnumpy.random.normal()")
    second = "import numpy; bool(numpy.random.normal() == numpy.random.RandomState(1).normal(size=2)[1])"
    with anyio.fail_after(HANG_S):
        async with agent_client(left) as client:
            assert (await run(client, second)).shown == ["False"]
            await rehearse(client)
            assert (await run(client, second)).shown == ["False"]


async def test_the_session_of_commands_begins_after_a_rehearsal():
    with anyio.fail_after(HANG_S):
        async with agent_client(WarmUp("shell", rehearsal="cd /tmp; export LEFT=1")) as client:
            await rehearse(client)
            assert (await command(client, 'echo "$PWD $LEFT"')).stdout == "/workspace \n"


async def test_a_rehearsal_that_fails_is_an_error_of_the_template():
    with anyio.fail_after(HANG_S):
        async with agent_client(None) as client:
            with pytest.raises(RequestRefused, match=r"the rehearsal failed: Traceback(.|\n)*no_such_name"):
                await client.warm(WarmUp(rehearsal="no_such_name"), HANG_S)


async def test_a_machine_whose_rehearsal_fails_later_runs_code():
    """It fails only the second time, in a clone."""
    code = "import builtins\nassert not hasattr(builtins, 'again')\nbuiltins.again = 1"
    with anyio.fail_after(HANG_S):
        async with agent_client(WarmUp(rehearsal=code)) as client:
            with pytest.raises(RequestRefused, match="the rehearsal failed"):
                await client.rehearse(HANG_S)
            await client.refresh(new_identity())
            assert (await run(client, "1 + 1")).shown == ["2"]
