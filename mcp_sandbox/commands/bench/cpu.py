"""The cost of a driver for code that only computes, compared with the same Python on the bare host."""

import statistics

from mcp_sandbox.commands.bench.native import native_process, template_files
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import Subject, run_code

TIMES_NATIVE = {"gvisor": 1.15, "bubblewrap": 1.05}
DEFAULT_TIMES_NATIVE = 1.15

# A function, because global variables are slower than local ones. It times itself, so that the call does not count.
# It computes with numbers, lists, dicts and strings for about 0.2 s, in little memory: allocation would cost extra.
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


async def measure(subject: Subject) -> Findings:
    """Alternate between native rounds and rounds in a machine, because the host's speed varies over minutes."""
    rounds = subject.plan.cpu_rounds
    native_s, inside_s = [], []
    tree = await template_files(subject)
    argv = ["unshare", "--map-root-user", "chroot", str(tree), "/usr/bin/python3", "-c", WORK + ANSWER]
    async with native_process(argv) as native, subject.start("bench-cpu") as (_, agent):
        await run_code(agent, WORK)
        for number in range(rounds + 1):
            subject.progress(f"computing natively and in a machine: {number} of {rounds}")
            if number % 2:  # the second of a pair finds the CPU awake
                native_s.append(await native(b""))
                inside_s.append(float(await run_code(agent, "work()")))
            else:
                inside_s.append(float(await run_code(agent, "work()")))
                native_s.append(await native(b""))
    pairs = list(zip(native_s, inside_s, strict=True))[1:]  # the first round touches memory for the first time
    ratio = statistics.median(inside / native for native, inside in pairs)
    figures = [
        figure("computing in Python, natively", "ms", [1000 * native for native, _ in pairs]),
        figure("the same in a machine", "ms", [1000 * inside for _, inside in pairs]),
    ]
    promised = TIMES_NATIVE.get(subject.driver.name, DEFAULT_TIMES_NATIVE)
    return Findings(figures, [Promise("CPU-bound Python against native", ratio, promised, "times")])
