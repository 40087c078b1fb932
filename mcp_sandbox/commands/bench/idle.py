"""What unused machines cost: those that wait in the pool, and those of sandboxes without a call."""

import re
from contextlib import suppress
from pathlib import Path

import anyio

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import BenchServer, open_server, pool_of
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from vmm.process_table import with_descendants
from vmm.usage import cpu_s

POOLED = (1, 4, 16)
LEASED = (1, 4)  # a server has room for eight
LOOK_S = 10.0
GLANCE_S = 0.5
STANDSTILL_S = 0.5  # the default is longer, and would only make this take longer
STAND_STILL_TIMEOUT_S = 30.0
SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


async def measure(subject: Subject) -> Findings:
    """Measure pools of several sizes, then one sandbox that is not used."""
    figures: list[Figure] = []
    pooled_percent = 0.0
    for count in POOLED:
        async with open_server(subject.settings, {"limits.sandboxes": count, **pool_of(subject, count)}) as server:
            subject.progress(f"{count} machines in the pool")
            await server.fill_pool(count)
            percent, switches = await _look(server)
        figures += _figures(f"{count} machines in the pool", percent, switches)
        pooled_percent = max(pooled_percent, percent / count)
    leased_percent = 0.0
    for count in LEASED:
        what = f"{count} sandboxes that are not used"
        async with open_server(subject.settings, {"pool.max": 0, "lifetime.standstill_s": STANDSTILL_S}) as server:
            subject.progress(what)
            for _ in range(count):
                await server.run(await server.create())
            await _stand_still(server)
            percent, switches = await _look(server)
        figures += _figures(what, percent, switches)
        leased_percent = max(leased_percent, percent / count)
    async with open_server(subject.settings, {"pool.max": 0, "lifetime.standstill_s": 0}) as server:
        subject.progress("a sandbox that never stands still")
        await server.run(await server.create())
        figures += _figures("a sandbox that never stands still", *await _look(server))
    promises = [
        Promise("CPU of a machine in the pool", pooled_percent, 0.1, "% of a core"),
        Promise("CPU of a sandbox in which nothing runs", leased_percent, 0.1, "% of a core"),
    ]
    return Findings(figures, promises)


def _figures(what: str, percent: float, switches: float) -> list[Figure]:
    return [figure(f"CPU of {what}", "%", [percent]), figure(f"context switches of {what}", "1/s", [switches])]


async def _stand_still(server: BenchServer) -> None:
    """Wait until no process below a server runs."""
    with anyio.move_on_after(STAND_STILL_TIMEOUT_S):
        while (await _look(server, GLANCE_S))[1] > 0:
            pass
        return
    raise MeasurementFailed(f"The machines did not stand still within {STAND_STILL_TIMEOUT_S:.0f} s.")


async def _look(server: BenchServer, look_s: float = LOOK_S) -> tuple[float, float]:
    """Return the percentage of a core and the context switches per second of all processes below a server."""
    pids = with_descendants(server.process.pid)[1:]
    used, switched = cpu_s(pids), _switches(pids)
    await anyio.sleep(look_s)
    return 100 * (cpu_s(pids) - used) / look_s, (_switches(pids) - switched) / look_s


def _switches(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for thread in Path(f"/proc/{pid}/task").iterdir():
                total += sum(map(int, SWITCHES.findall((thread / "status").read_text())))
    return total
