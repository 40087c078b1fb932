"""The first call in a sandbox from the pool compared with the second, by template; and figures compared with native."""

import statistics
from dataclasses import replace

from mcp_sandbox.commands.bench.compiling import CPP, GO
from mcp_sandbox.commands.bench.native import native_process, template_files
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import BenchServer, open_server, pool_of, sandbox_of
from mcp_sandbox.commands.bench.subject import Subject, run_code
from templates.build import BuiltTemplate

FIRST_OVER_SECOND = 3.0
BOTH_CALLS_MS = 15.0  # create_sandbox and the first run, of the template below
FIGURE_OVER_NATIVE = 1.3
DATA_ANALYSIS = "python-data-analysis"

CODE = {
    "python": "print(sum(range(3)))",
    "cpp": CPP,
    "go": GO,
    "java": "class Main { public static void main(String[] a) { System.out.println(2); } }",
    "javascript": "console.log(1 + 1)",
    "r": "print(1 + 1)",
    "shell": "echo 2",
}
NUMPY = "import numpy; print(numpy.arange(3).sum())"
COMMENT = {"python": "#", "r": "#", "shell": "#"}  # elsewhere two slashes

# Draws as the kernel does, and times itself. Both sides have the same files and Python.
NATIVE = """
import io, sys, time
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
for _ in sys.stdin:
    began = time.perf_counter()
    plt.plot([1, 2, 3])
    plt.gcf().savefig(io.BytesIO(), format="png", bbox_inches="tight")
    plt.close("all")
    print(time.perf_counter() - began, flush=True)
"""
INSIDE = """
import time
import matplotlib.pyplot as plt
began = time.perf_counter()
plt.plot([1, 2, 3])
plt.show()
time.perf_counter() - began
"""


async def measure(subject: Subject) -> Findings:
    """Measure every template that is built, then figures in the one that draws them."""
    findings = Findings()
    for template in subject.settings.catalogue.templates().values():
        built = await subject.builder.find(template, subject.driver)
        if built is not None and template.pool == "pooled":
            findings.add(await _calls(replace(subject, built=built)))
            if template.name == DATA_ANALYSIS and not subject.driver.capabilities.boots_kernel:
                findings.add(await _figures(replace(subject, built=built)))
    return findings


async def _calls(subject: Subject) -> Findings:
    """Time create_sandbox and the first two runs in it, each time with a machine ready and the server idle."""
    template, rounds = subject.built.template, subject.plan.pool_hits // 5
    create_ms, first_ms, second_ms = [], [], []
    async with open_server(subject.settings, {"template": template.name, **pool_of(subject, 1)}) as server:
        await server.fill_pool(1)
        for number in range(rounds + 1):
            subject.progress(f"first calls with {template.name}: {number} of {rounds}")
            await server.wait_idle(1)
            created_ms, created = await server.time_call("create_sandbox", {})
            sandbox = sandbox_of(created)
            create_ms.append(created_ms)
            first_ms.append(await _run(server, subject.built, sandbox, f"{number} first"))
            second_ms.append(await _run(server, subject.built, sandbox, f"{number} second"))
            await server.close(sandbox)
    del create_ms[0], first_ms[0], second_ms[0]  # the server's own first calls
    ratio = statistics.median(first / second for first, second in zip(first_ms, second_ms, strict=True))
    findings = Findings(
        [
            figure(f"create_sandbox of {template.name} on a pool hit", "ms", create_ms),
            figure("the first run in it", "ms", first_ms),
            figure("the second run in it", "ms", second_ms),
        ],
        [Promise(f"first run with {template.name} over the second, p50", ratio, FIRST_OVER_SECOND, "times")],
    )
    if template.name == DATA_ANALYSIS:
        both_ms = statistics.median(map(sum, zip(create_ms, first_ms, strict=True)))
        findings.promises.append(Promise("create_sandbox and the first run, p50", both_ms, BOTH_CALLS_MS, "ms"))
    return findings


async def _run(server: BenchServer, built: BuiltTemplate, sandbox: str, mark: str) -> float:
    """Return the milliseconds that a run took. `mark` makes its code differ from all others: no cache has it."""
    template = built.template
    code = NUMPY if template.name == DATA_ANALYSIS else CODE[template.language]
    code = f"{code}\n{COMMENT.get(template.language, '//')} {mark}\n"
    took_ms, _ = await server.time_call("run_code", {"sandbox_id": sandbox, "code": code})
    return took_ms


async def _figures(subject: Subject) -> Findings:
    """Alternate between native figures and figures in a machine, because the host's speed varies over minutes."""
    rounds = subject.plan.cpu_rounds
    native_s, inside_s = [], []
    tree = await template_files(subject)
    argv = ["unshare", "--map-root-user", "chroot", str(tree), "/usr/bin/python3", "-c", NATIVE]
    async with native_process(argv) as native, subject.start("bench-first") as (_, agent):
        for number in range(rounds + 1):
            subject.progress(f"figures natively and in a machine: {number} of {rounds}")
            native_s.append(await native(b""))
            inside_s.append(float(await run_code(agent, INSIDE)))
    pairs = list(zip(native_s, inside_s, strict=True))[1:]  # the first figure touches memory for the first time
    ratio = statistics.median(inside / native for native, inside in pairs)
    return Findings(
        [
            figure("a figure, drawn natively", "ms", [1000 * native for native, _ in pairs]),
            figure("the same with plt.show in a machine", "ms", [1000 * inside for _, inside in pairs]),
        ],
        [Promise("plt.show against native, p50", ratio, FIGURE_OVER_NATIVE, "times")],
    )
