"""Machines that have rehearsed for the pool: their owners cannot tell."""

import json
from typing import Any

import anyio
import pytest

from tests.functional.machines import Clone, Machines
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

LOOK = '''
import contextlib, json, linecache, os, sys, threading, warnings
import matplotlib, matplotlib.pyplot as plt
def files(*folders):
    return sorted(os.path.join(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names)
def processes():
    """Count all but the kernel's threads, which come and go. A name may be that of a program that is just starting."""
    count = 0
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{number}/stat") as stat:
            flags = int(stat.read().rsplit(")", 1)[1].split()[6])
            count += not flags & 0x00200000  # PF_KTHREAD
    return count
def fixed(value):
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
facts = {
    "variables": sorted(globals()),
    "last values": [repr(_), repr(__), repr(___)],
    "history": [len(In), len(Out), get_ipython().execution_count],
    "modules": sorted(sys.modules),
    "lines": sorted(name for name in linecache.cache if name.startswith("<cell")),
    "environment": {name: value for name, value in os.environ.items()},
    "directory": os.getcwd(),
    "files": files("/tmp", "/workspace", "/dev/shm", "/var/tmp"),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "processes": processes(),
    "warnings": [str(filter) for filter in warnings.filters],
    "settings": {name: fixed(value) for name, value in matplotlib.rcParams.items()},
    "figures": [plt.get_fignums(), plt.figure().number],
}
plt.close()
print(*facts, sep="\\n")
'''
DRAW = "import json, random, numpy; print(json.dumps([random.gauss(0, 1), numpy.random.normal(), numpy.random.rand()]))"
FIGURE = "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()"


async def look(clone: Clone) -> dict[str, Any]:
    """Return what code finds out about everything before it; each fact by itself, because all would be too long."""
    names = (await clone.run(LOOK)).out.splitlines()
    return {name: json.loads((await clone.run(f"print(json.dumps(facts[{name!r}]))")).out) for name in names}


async def test_no_code_notices_that_its_machine_has_rehearsed(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.clone() as plain, machines.clone(rehearse=True) as rehearsed:
            assert await look(rehearsed) == await look(plain)
            session = "echo $PWD; env | grep -v HOSTNAME | sort"
            assert (await rehearsed.command(session)).out == (await plain.command(session)).out
            assert (await rehearsed.run(FIGURE)).displays[0].files == ("/tmp/outputs/figure-1.png",)


async def test_machines_that_have_rehearsed_differ_in_what_they_draw(machines: Machines):
    drawn: list[float] = []
    with anyio.fail_after(HANG_S):
        for _ in range(2):
            async with machines.clone(rehearse=True) as clone:
                drawn += json.loads((await clone.run(DRAW)).out)
    assert len(set(drawn)) == len(drawn)
