"""What a machine can do to the server and to other sandboxes by what its agent sends.

This process is the server. It has an honest machine, whose runs are timed, and one whose agent belongs to the attacker.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import RunCode
from guest.client.streams import TOLERANCE
from guest.errors import GuestError
from guest.streams import OPENS_PER_S
from mcp_sandbox.commands.bench.hostile_agent import DONE, pack_hostile_agent
from mcp_sandbox.commands.bench.http import forget_peak_mb, memory_mb
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import Subject, run_code
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from vmm.types import GuestCode, NetworkMode

GROWTH_MB = 16  # promised, and measured at its peak
TIMES = 2.0  # promised for the p99 of an honest sandbox's runs
FRAMES = 1_000_000
BATCH = 1000  # frames of one write
OPENING_S = 20  # at the rate that the host tolerates; then without a limit, until the machine is lost
WARM_S, IDLE_S = 2.0, 15.0  # of runs before an attack, not timed and timed
PAUSE_S = 0.02  # between two runs: a caller thinks

STREAM = 'def stream(do): raw(encode({"stream": number, "do": do}))\nnumber = 1\n'
ATTACKS = {
    # An honest agent may send this, too: the host has given a stream up while data was on the way.
    f"{FRAMES:,} useless frames": (
        f'{STREAM}stream("open"); stream("reset")\n'
        f'frames = encode({{"stream": 1, "do": "data"}}, b"x") * {BATCH}\n'
        f"for _ in range({FRAMES // BATCH}): raw(frames)\n{DONE}"
    ),
    "streams without end": (
        f"{STREAM}import time\nuntil = time.monotonic() + {OPENING_S}\nwhile True:\n"
        '    stream("open"); stream("reset"); number += 1\n'
        f"    if time.monotonic() < until: time.sleep({1 / (OPENS_PER_S * TOLERANCE)})"
    ),
}


async def measure(subject: Subject) -> Findings:
    """Time the runs of an honest machine before each attack and beside it."""
    findings = Findings()
    async with subject.start("bench-honest") as (_, honest):
        for name, code in ATTACKS.items():
            subject.progress(name)
            async with _attacker(subject) as attacker:
                await _sample(honest, WARM_S)
                idle = figure(f"run_code before {name}", "ms", await _sample(honest, IDLE_S))
                before = forget_peak_mb()
                during = figure(f"run_code beside {name}", "ms", await _beside(attacker, code, honest))
                growth = memory_mb("VmHWM") - before
            findings.figures += [idle, during]
            findings.promises += [
                Promise(f"growth of the server beside {name}", growth, GROWTH_MB, "MB"),
                Promise(f"run_code beside {name} over before, p99", during.p99 / idle.p99, TIMES, "times"),
            ]
    return findings


async def _beside(attacker: AgentClient, code: str, honest: AgentClient) -> list[float]:
    """Return how long runs took, in milliseconds, from the start of an attack to its end."""
    samples: list[float] = []
    async with anyio.create_task_group() as tasks:

        async def attack() -> None:
            with suppress(GuestError):  # the machine may lose its agent's channel for it
                async with attacker.run(RunCode(code=code)) as run:
                    await run.wait_finished()
            tasks.cancel_scope.cancel()

        tasks.start_soon(attack)
        while True:
            samples += await _sample(honest, 0)
    return samples


async def _sample(agent: AgentClient, seconds: float) -> list[float]:
    """Return how long runs took, in milliseconds: all of so many seconds, at least one."""
    samples: list[float] = []
    until = anyio.current_time() + seconds
    while not samples or anyio.current_time() < until:
        began = anyio.current_time()
        await run_code(agent)
        samples.append(1000 * (anyio.current_time() - began))
        await anyio.sleep(PAUSE_S)
    return samples


@asynccontextmanager
async def _attacker(subject: Subject) -> AsyncIterator[AgentClient]:
    """Start a machine that may open streams, with an agent that belongs to the attacker."""

    async def ignore(_stream: ByteStream) -> None:
        await anyio.sleep_forever()

    with TemporaryDirectory() as folder:
        archive = Path(folder) / "hostile.tar"
        pack_hostile_agent(archive)
        built = replace(subject.built, boot=GuestCode(archive), snapshot=None)
        identity = new_identity(network=NetworkMode.PROXY)
        async with start(subject.driver, built, identity, NetworkMode.PROXY, ignore) as (_, agent):
            yield agent
