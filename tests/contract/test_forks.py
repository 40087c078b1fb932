"""Forked and paused sandboxes, on every driver that takes snapshots."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest

from mcp_sandbox.machines.provider import LeasedMachine
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from tests.functional.machines import Machines, pid_of
from tests.waiting import HANG_S, LOOK_AGAIN_S

pytestmark = pytest.mark.vm

ME = "me"
MIB = 1024 * 1024

PREPARE = """
import subprocess, threading
import numpy
words = {"kept": [1, 2, 3]}
block = numpy.arange(2_000_000)
with open("lines.txt", "w") as file:
    file.write("first\\nsecond\\nthird\\n")
lines = open("lines.txt")
lines.readline()
helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
ticks = []
def tick():
    while True:
        ticks.append(len(ticks))
        threading.Event().wait(0.05)
threading.Thread(target=tick, daemon=True).start()
"""
LOOK = """
helper.stdin.write("hello\\n"); helper.stdin.flush()
before = len(ticks)
while len(ticks) == before: threading.Event().wait(0.05)
print(words["kept"], int(block.sum()), lines.readline().strip(), open("lines.txt").read().split(), end=" ")
print(helper.stdout.readline().strip())
"""
SAME = "[1, 2, 3] 1999999000000 second ['first', 'second', 'third'] hello"
UNIQUE = """
import json, os, random, secrets, socket, tempfile, uuid
import numpy
print(json.dumps({
    "os.urandom": os.urandom(16).hex(),
    "random.random": random.random(),
    "numpy.random.rand": numpy.random.rand(),
    "numpy.random.default_rng": numpy.random.default_rng().random(),
    "uuid.uuid1": str(uuid.uuid1()),
    "uuid.uuid4": str(uuid.uuid4()),
    "secrets.token_hex": secrets.token_hex(16),
    "temporary name": next(tempfile._get_candidate_names()),
    "hostname": socket.gethostname(),
    "/etc/hostname": open("/etc/hostname").read(),
    "machine-id": open("/etc/machine-id").read(),
}))
"""
NAMES = "import socket; print(socket.gethostname(), open('/etc/hostname').read(), open('/etc/machine-id').read())"


class Sandboxes:
    """A service with real machines, as one owner uses it."""

    def __init__(self, service: SandboxService, run_dir: Path) -> None:
        self.service = service
        self.run_dir = run_dir

    async def create(self) -> str:
        return (await self.service.create(ME)).sandbox_id

    async def run(self, box: str, code: str) -> str:
        result = await self.service.run(CodeRun(ME, code, box))
        assert result.status == "ok", result.error
        return result.stdout.head.strip()

    async def fork(self, box: str, count: int = 1) -> list[str]:
        return [copy.sandbox_id for copy in await self.service.fork(ME, box, count)]

    def machine(self, box: str) -> LeasedMachine | None:
        lease = next(found.lease for found in self.service.alive() if found.id == box)
        return lease.machine if lease else None

    def pid(self, box: str) -> int:
        machine = self.machine(box)
        assert machine is not None
        return pid_of(machine)

    def frozen(self) -> list[Path]:
        return list(self.run_dir.glob("*-frozen-*"))


@pytest.fixture
async def boxes(machines: Machines) -> AsyncIterator[Sandboxes]:
    if not machines.host.driver.capabilities.snapshot:
        pytest.skip(f"{machines.host.driver.name} takes no snapshots")
    with anyio.fail_after(HANG_S):
        async with SandboxService(machines.provider(), machines.host.settings) as service:
            yield Sandboxes(service, machines.host.settings.run_dir)


@pytest.mark.rights
async def test_a_copy_has_the_variables_open_files_processes_threads_and_disk(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, PREPARE)
    for copy in await boxes.fork(box, 2):
        assert await boxes.run(copy, LOOK) == SAME
    assert await boxes.run(box, LOOK) == SAME
    assert boxes.frozen() == []


async def test_copies_and_original_are_independent(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, "mark = ['all']\nopen('mark', 'w').write('all')")
    family = [box, *await boxes.fork(box, 2)]
    for name in family:
        await boxes.run(name, f"mark.append({name!r})\nopen('mark', 'a').write({name!r})\nimport os; os.sync()")
    for name in family:
        assert await boxes.run(name, "print(mark, open('mark').read())") == f"['all', {name!r}] all{name}"
    await boxes.service.close(ME, box)
    assert await boxes.run(family[1], "print(len(mark))") == "2"


async def test_copies_and_original_have_different_random_numbers_and_identities(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, f"{UNIQUE}\nrandom.seed(1); numpy.random.seed(1); uuid.getnode(); tempfile.mktemp()")
    looks = [json.loads(await boxes.run(name, UNIQUE)) for name in [box, *await boxes.fork(box, 3)]]
    for what in looks[0]:
        assert len({look[what] for look in looks}) == len(looks), what


async def test_a_fork_does_not_change_the_original(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, "import random\nrandom.seed(1); expected = random.random(); random.seed(1)")
    names = await boxes.run(box, NAMES)
    await boxes.fork(box)
    assert await boxes.run(box, "print(random.random() == expected)") == "True"
    assert await boxes.run(box, NAMES) == names
    before = time.time()
    assert before - 1 < float(await boxes.run(box, "import time; print(time.time())")) < time.time() + 1


async def test_a_copy_can_be_forked_and_paused(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, "generation = [0]")
    for number in (1, 2, 3):
        (copy,) = await boxes.fork(box)
        await boxes.service.close(ME, box)
        box = copy
        await boxes.run(box, f"generation.append({number})")
    await boxes.service.pause(ME, box)
    await boxes.service.resume(ME, box)
    assert await boxes.run(box, "print(generation)") == "[0, 1, 2, 3]"


@pytest.mark.rights
async def test_a_pause_frees_the_machine_and_a_resume_restores_its_state_repeatedly(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.run(box, f"{PREPARE}\nimport random\nrandom.seed(1); expected = random.random(); random.seed(1)")
    names = await boxes.run(box, NAMES)
    for _ in range(2):
        process = psutil.Process(boxes.pid(box))
        info = await boxes.service.pause(ME, box)
        assert info.state == "paused"
        assert boxes.machine(box) is None
        assert not process.is_running()
        assert boxes.service.admission.holders == []
        assert [path.stat().st_mode & 0o777 for path in boxes.frozen()] == [0o700]
        assert (await boxes.service.resume(ME, box)).state == "ready"
        while boxes.frozen():  # it is removed as soon as the sandbox can be used
            await anyio.sleep(LOOK_AGAIN_S)
        assert await boxes.run(box, NAMES) == names
    assert await boxes.run(box, LOOK) == SAME
    assert await boxes.run(box, "print(random.random() == expected)") == "True"


async def test_the_clock_is_right_after_a_pause(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.service.pause(ME, box)
    await anyio.sleep(1.5)  # longer than the clock may be wrong
    await boxes.service.resume(ME, box)
    before = time.time()
    assert before - 1 < float(await boxes.run(box, "import time; print(time.time())")) < time.time() + 1


async def test_closing_a_paused_sandbox_removes_its_files(boxes: Sandboxes):
    box = await boxes.create()
    await boxes.service.pause(ME, box)
    assert await boxes.service.close(ME, box)
    assert boxes.frozen() == []
