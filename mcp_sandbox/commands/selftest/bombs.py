"""Code that takes all it can get: processes, memory, disk, output, time. The sandbox must go on, within its limits."""

import re

from guest.places import AGENT_PYTHON, WORKSPACE
from mcp_sandbox.commands.selftest.results import Outcome, Verdict, broken, failed, held
from mcp_sandbox.commands.selftest.subject import Box, Subject
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.views import RunView

OVERHEAD_MB = 150  # what a sandbox may take beyond its memory_mb, see docs/operations.md
BEYOND_MB = 300  # what a bomb tries to take beyond a limit: enough to show that there is none
CHUNK_MB = 16
SLACK_MB = 64  # what a process had that was killed meanwhile, and charges of the kernel in batches
BOMB_S = 2.0  # until the host stops a bomb that never ends
FILL_S = 180.0  # an emulated CPU needs most of it to fill a disk
FLOOD_BYTES = 20_000_000

# Forks endlessly into new sessions and ignores interrupts.
FORK_BOMB = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        if not os.fork(): os.setsid()
    except OSError: pass
"""
COUNT_BOMBS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -cx 'bomb[.]py'; true"

# Prints the memory it has after each step, so that the last line counts, however it ends.
MEMORY_BOMB = """
import mmap
kept, size = [], {chunk} << 20
for number in range({chunks}):
    kept.append(mmap.mmap(-1, size, flags=mmap.{kind} | mmap.MAP_ANONYMOUS))
    for page in range(0, size, 4096): kept[-1][page] = 1
    print((number + 1) * {chunk}, flush=True)
"""

# Fills sockets, whose content is in the memory of the kernel, in as many processes as it needs.
SOCKET_BOMB = """
import os, select, signal, socket
kept = []  # what each process before this one has, which counts as long as that process lives
def total(): return taken + sum(size for alive, size in kept if not select.select([alive], [], [], 0)[0])
while True:
    pairs, taken = [], 0
    alive, mine = os.pipe()
    try:
        while total() < {most} << 20:
            pairs.append(socket.socketpair())
            pairs[-1][0].setblocking(False)
            try:
                while True: taken += pairs[-1][0].send(bytes(65536))
            except BlockingIOError: pass
            if len(pairs) % 20 == 0: print(total() >> 20, flush=True)
    except OSError: pass
    print(total() >> 20, flush=True)
    if not taken or total() >= {most} << 20 or os.fork(): break  # the child goes on; its parent keeps what it has
    os.close(mine)
    kept.append((alive, taken))
signal.alarm(5)
signal.pause()
"""

# Starts processes from a large one, as far as that is allowed, and ends them.
MANY_PROCESSES = """
import os, signal
children = []
try:
    while len(children) < 200:
        child = os.fork()
        if child == 0: signal.pause()
        children.append(child)
except OSError: pass
print(len(children), flush=True)
for child in children: os.kill(child, signal.SIGKILL)
for child in children: os.waitpid(child, 0)
"""

# Writes to everything it has inherited, the channel of its kernel included.
NONSENSE = """
import os
for number in range(3, 256):
    try:
        os.set_blocking(number, False)
        os.write(number, b'{"type": "nonsense", "size": -1}' * 100)
    except OSError: pass
"""

# Prints how much it has written after each step, and removes everything at its end.
DISK_BOMB = """
import os
left, written, files = {most}, 0, []
for place in ("/workspace", "/tmp", "/var/tmp", "/dev/shm", "/run/user", "/run"):
    try:
        files.append(open(f"{{place}}/ballast", "wb", buffering=0))
        os.unlink(files[-1].name)
        while written < left:
            written += files[-1].write(bytes(1 << 20)) >> 20
            print(written, flush=True)
    except OSError:
        pass
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


async def fork_bomb(subject: Subject) -> Outcome:
    """Start a fork bomb, let its time limit stop it, and look what is left."""
    async with subject.fresh() as box:
        await box.write(f"{WORKSPACE}/bomb.py", FORK_BOMB.encode())
        try:
            await box.command(f"{AGENT_PYTHON} bomb.py", BOMB_S)
            left = (await box.command(COUNT_BOMBS)).stdout.head.strip()
        except SandboxError as error:
            return broken(f"the sandbox is lost: {error}")
    return held("stopped, and none of its processes is left") if left == "0" else broken(f"{left} processes are left")


async def memory_bomb(subject: Subject) -> Outcome:
    """Take private memory until there is no more."""
    return await _take_memory(subject, "MAP_PRIVATE")


async def shared_memory_bomb(subject: Subject) -> Outcome:
    """Take shared memory, which no limit of a single process counts."""
    return await _take_memory(subject, "MAP_SHARED")


async def socket_bomb(subject: Subject) -> Outcome:
    """Take memory of the machine's kernel. The machine may end, but its host must not pay."""
    async with subject.fresh() as box:
        limit = box.view.memory_mb + OVERHEAD_MB
        source = SOCKET_BOMB.format(most=box.view.memory_mb + BEYOND_MB)
        try:
            taken = _last_number(await box.python(source, FILL_S))
        except SandboxError as error:
            return held(f"the machine was ended: {error}")
    return _within(taken, limit + SLACK_MB, "MB in sockets")


async def many_processes(subject: Subject) -> Outcome:
    """Start as many processes as are allowed."""
    async with subject.fresh() as box:
        run = box.code if "code" in box.ways else box.python
        try:
            result = await run(MANY_PROCESSES, FILL_S)
        except SandboxError as error:
            return broken(f"the sandbox is lost: {error}")
        ended = result.error.message if result.error else result.status
        if result.status == "ok" and not _last_number(result):
            return failed("no process was started")
        return await _alive(box, f"{_last_number(result)} processes" if result.status == "ok" else f"stopped: {ended}")


async def nonsense(subject: Subject) -> Outcome:
    """Write nonsense to every descriptor of a process that runs code."""
    async with subject.fresh() as box:
        try:
            await box.python(NONSENSE)
            if "code" in box.ways:
                await box.code(NONSENSE)
                await box.code(NONSENSE)  # in a new process, if that was the end of the first
        except SandboxError as error:
            return broken(f"the sandbox is lost: {error}")
        return await _alive(box, "at most the code itself ended")


async def full_disk(subject: Subject) -> Outcome:
    """Write to every place until it is full."""
    async with subject.fresh() as box:
        limit = box.view.disk_mb + box.view.memory_mb  # some drivers keep files in the memory of the host
        source = DISK_BOMB.format(most=limit + BEYOND_MB)
        return await _contained(box, source, limit, "MB on disk")


async def flood(subject: Subject) -> Outcome:
    """Print without end."""
    box = await subject.shared()
    output = subject.service.settings.output
    result = await box.command(f"yes flood | head -c {FLOOD_BYTES}", FILL_S)
    kept = len(result.stdout.head) + len(result.stdout.tail)
    if kept > output.live_bytes + output.tail_bytes:
        return broken(f"the result has {kept:,} characters")
    return await _alive(box, f"{kept:,} of {FLOOD_BYTES:,} characters are in the result")


async def endless_run(subject: Subject) -> Outcome:
    """Ignore interrupts and never end."""
    async with subject.fresh() as box:
        results = [await box.python(STUBBORN, BOMB_S)]
        if "code" in box.ways:
            results.append(await box.code(STUBBORN, BOMB_S))
        if any(result.timed_out_after_s is None for result in results):
            return broken("a run outlived its time limit")
        return await _alive(box, "stopped at its time limit")


async def kill_everything(subject: Subject) -> Outcome:
    """Kill every process that can be killed."""
    source = "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nfinally: os.kill(os.getpid(), signal.SIGKILL)"
    async with subject.fresh() as box:
        try:
            await box.python(source)
            if "code" in box.ways:
                await box.code(source)
        except SandboxError as error:
            return broken(f"the sandbox is lost: {error}")
        return await _alive(box, "only the code itself ended")


async def _take_memory(subject: Subject, kind: str) -> Outcome:
    async with subject.fresh() as box:
        limit = box.view.memory_mb + OVERHEAD_MB
        chunks = (box.view.memory_mb + BEYOND_MB) // CHUNK_MB
        return await _contained(
            box, MEMORY_BOMB.format(chunk=CHUNK_MB, chunks=chunks, kind=kind), limit, "MB of memory"
        )


async def _contained(box: Box, bomb: str, limit: int, unit: str) -> Outcome:
    try:
        taken = _last_number(await box.python(bomb, FILL_S))
    except SandboxError as error:
        return broken(f"the sandbox is lost: {error}")
    outcome = _within(taken, limit, unit)
    return outcome if outcome.verdict is not Verdict.HELD else await _alive(box, outcome.detail)


def _within(taken: int, limit: int, unit: str) -> Outcome:
    if taken == 0:
        return failed(f"no {unit} could be had")
    detail = f"{taken} {unit}; the limit is {limit}"
    return held(detail) if taken <= limit else broken(detail)


def _last_number(result: RunView) -> int:
    numbers = re.findall(r"\d+", result.stdout.tail or result.stdout.head)
    return int(numbers[-1]) if numbers else 0


async def _alive(box: Box, detail: str) -> Outcome:
    return held(detail) if await box.goes_on() else broken("the sandbox no longer runs commands")
