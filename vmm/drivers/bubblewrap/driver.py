"""Machines that are processes in namespaces, on the host's kernel: the weakest isolation, and the fastest start.

`auto` never chooses it. `probe.WEAKNESSES` lists what it does not protect from.
"""

import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, cycle, islice

import anyio

from vmm import agent, limits
from vmm.driver import DriverConfig, Machine, check_network
from vmm.drivers.bubblewrap import INFO, command, memory, probe
from vmm.errors import DriverUnavailable, LaunchFailed
from vmm.machine import StdioMachine
from vmm.network.nat import Nat
from vmm.process import RunningProcess, find_tool, spawn
from vmm.scratch import scratch_mb
from vmm.trust import check_trusted
from vmm.types import GuestCode, Limits, MachineSpec, NetworkMode, Probe

MIB = 1024 * 1024
START_S = 20.0  # it takes 50 ms; a busy host needs much longer
PROCESSES = 256  # threads count too
OPEN_FILES = 4096
_turns = count()  # of machines, which share the host's CPUs


class BubblewrapDriver:
    """Starts machines with bubblewrap."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._verdict: Probe | None = None
        self._probing = anyio.Lock()
        self._nat = Nat(config.nat, config.run_dir)

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None:
                self._verdict = await probe.probe(limits.detect())
            return self._verdict

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        verdict = await self.probe()
        if not verdict.usable:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(limits.machine_group(self._config.run_dir, spec.id, _limits(spec)))
            process = await _start(stack, spec, group)
            machine = StdioMachine(spec, process, group)
            stack.push_async_callback(machine.let_end)
            if spec.network is NetworkMode.NAT:
                machine.device = await stack.enter_async_context(self._nat.veth(spec.id, process))
            await _send_agent(spec, process)
            if not group.bounds_memory:
                stack.enter_context(machine.watched(memory.finder(scratch_mb(spec))))
            yield machine

    async def aclose(self) -> None:
        """Do nothing: the driver holds nothing between machines."""


async def _start(stack: AsyncExitStack, spec: MachineSpec, group: limits.ControlGroup) -> RunningProcess:
    binary = find_tool(command.PROGRAM)
    assert binary is not None  # the probe found it
    check_trusted(spec.root)  # a mount needs its path, which no other user can change
    confined = probe.confinement(spec.root, spec.network)
    box = command.machine_box(spec, probe.place_of(spec.root, confined))
    first = agent.agent_argv("--user", "none", "--own-pids", "--memory-mb", str(spec.memory_mb))
    with command.prepared(binary, box, command.started(_process_limits(spec), _next_cpus(spec.vcpus), first)) as start:
        return await stack.enter_async_context(
            spawn(
                group.wrap(start.argv),
                confinement=confined,
                before_start=group.add,
                pass_fds=start.files,
                stdio=True,
            )
        )


def _next_cpus(number: int) -> list[int]:
    """Return CPUs for a machine, each time others."""
    cpus = sorted(os.sched_getaffinity(0))
    first = next(_turns) * number % len(cpus)
    return list(islice(cycle(cpus), first, first + min(number, len(cpus))))


async def _send_agent(spec: MachineSpec, process: RunningProcess) -> None:
    """Wait until the machine is up, and send it its agent."""
    assert isinstance(spec.boot, GuestCode)  # as `capabilities` says
    try:
        with anyio.fail_after(START_S):
            await process.stream.receive(len(command.READY))
            await agent.send_code(process.stream, spec.boot.archive)
    except TimeoutError as error:
        raise LaunchFailed(f"machine {spec.id} did not start in {START_S:.0f} s: {process.tail}") from error
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
        raise LaunchFailed(f"machine {spec.id} did not start: {await process.wait()}") from error


def _limits(spec: MachineSpec) -> Limits:
    """Return a machine's limits. Its files are in memory."""
    return Limits(memory_bytes=spec.host_bytes, cpus=spec.vcpus, pids=PROCESSES)


def _process_limits(spec: MachineSpec) -> dict[int, int]:
    """Return limits on each process and on their number, which hold without cgroups, too."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_FSIZE: spec.memory_mb * MIB}
    if limits.nproc_is_per_machine():
        wanted[resource.RLIMIT_NPROC] = PROCESSES
    own = {kind: resource.getrlimit(kind)[1] for kind in wanted}  # we cannot raise our own
    return {
        kind: most if own[kind] == resource.RLIM_INFINITY else min(most, own[kind]) for kind, most in wanted.items()
    }
