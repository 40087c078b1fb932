"""What a driver costs code that only computes, against the same Python on the bare host."""

import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import Subject, run_code
from vmm.driver import DriverConfig, load_driver
from vmm.limits import control_group, detect
from vmm.process import Confinement, spawn
from vmm.types import Limits

TIMES_NATIVE = {"gvisor": 1.15, "bubblewrap": 1.05}
OTHERS_TIMES_NATIVE = 1.15
MAX_LINE = 100

# A function, because sandboxes run code in a namespace of their own, where a loop at the top would be slower. It times
# itself, so that what it takes to ask for it does not count. It computes with numbers, lists, dicts and strings for
# about 0.2 s, in little memory: what it takes to get memory from the kernel is another question.
WORK = """
def work():
    from time import perf_counter
    began = perf_counter()
    for _ in range(40):
        marks, primes, counts, total = bytearray(30_000), [], {}, 0.0
        for number in range(2, len(marks)):
            if not marks[number]:
                primes.append(number)
                for multiple in range(number * number, len(marks), number):
                    marks[multiple] = 1
        for prime in primes:
            for digit in str(prime * prime):
                counts[digit] = counts.get(digit, 0) + 1
            total += prime ** 0.5
    return perf_counter() - began
"""
ANSWER = "import sys\nfor _ in sys.stdin: print(work(), flush=True)\n"

Round = Callable[[], Awaitable[float]]


async def measure(subject: Subject) -> Findings:
    """Rounds natively and in a machine, taking turns: the host's own speed changes from minute to minute."""
    rounds = subject.plan.cpu_rounds
    native_s, inside_s = [], []
    async with _native(await _tree(subject)) as native, _inside(subject) as inside:
        for number in range(rounds + 1):
            subject.tell(f"computing natively and in a machine: {number} of {rounds}")
            if number % 2:  # whoever comes second finds the CPU awake
                native_s.append(await native())
                inside_s.append(await inside())
            else:
                inside_s.append(await inside())
                native_s.append(await native())
    pairs = list(zip(native_s, inside_s, strict=True))[1:]  # the first round touches memory for the first time
    ratio = statistics.median(inside / native for native, inside in pairs)
    figures = [
        figure("computing in Python, natively", "ms", [1000 * native for native, _ in pairs]),
        figure("the same in a machine", "ms", [1000 * inside for _, inside in pairs]),
    ]
    promised = TIMES_NATIVE.get(subject.driver.name, OTHERS_TIMES_NATIVE)
    return Findings(figures, [Promise("CPU-bound Python against native", ratio, promised, "times")])


async def _tree(subject: Subject) -> Path:
    """The files of the template, as bubblewrap has them: unpacked now if nobody has done it yet."""
    settings = subject.settings
    bubblewrap = load_driver("bubblewrap", DriverConfig(settings.run_dir, settings.cache_dir))
    subject.tell("unpacking the template's files")
    return (await subject.builder.build(subject.built.template, bubblewrap)).root


@asynccontextmanager
async def _native(tree: Path) -> AsyncIterator[Round]:
    """The template's own interpreter and libraries, as a plain process of this host.

    It has a control group, though without ceilings, as machines do: on a busy host each group gets an equal share.
    """
    argv = ["unshare", "--map-root-user", "chroot", str(tree), "/usr/bin/python3", "-c", WORK + ANSWER]
    async with (
        control_group(detect(), "bench-native", Limits()) as group,
        spawn(group.wrap(argv), confinement=Confinement(offline=False), before_start=group.add, talks=True) as process,
    ):
        answers = BufferedByteReceiveStream(process.stream)

        async def work() -> float:
            await process.stream.send(b"\n")
            return float(await answers.receive_until(b"\n", MAX_LINE))

        yield work


@asynccontextmanager
async def _inside(subject: Subject) -> AsyncIterator[Round]:
    async with subject.start("bench-cpu") as (_, agent):
        await run_code(agent, WORK)

        async def work() -> float:
            return float(await run_code(agent, "work()"))

        yield work
