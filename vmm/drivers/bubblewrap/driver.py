"""Machines that are processes of the host's kernel, seen through namespaces: the weakest walls, and the quickest.

Used only when somebody asks for it by name. `probe.WEAKNESSES` says what it cannot do.
"""

import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from vmm import agent, limits
from vmm.driver import DriverConfig, Machine
from vmm.drivers.bubblewrap import INFO, command, probe
from vmm.drivers.bubblewrap import pause as pausing
from vmm.errors import DriverUnavailable, LaunchFailed, MachineLost
from vmm.machine import TalkingMachine
from vmm.process import RunningProcess, find_tool, spawn
from vmm.process_table import children_of
from vmm.types import GuestCode, Limits, MachineSpec, Probe

MIB = 1024 * 1024
START_S = 20.0  # it takes 50 ms; a busy host may need far longer
OVERHEAD_MB = 96  # the agent, and what the kernel keeps for so many processes
PROCESSES = 256  # threads count too
OPEN_FILES = 4096


class BubblewrapMachine(TalkingMachine):
    """A running bubblewrap, and the processes in its namespaces."""

    def __init__(self, spec: MachineSpec, process: RunningProcess, group: limits.ControlGroup) -> None:
        super().__init__(spec, process, group)
        self._stopped: list[int] = []

    async def pause(self) -> None:
        if not children_of(self.pid):
            raise MachineLost(f"machine {self.id} has ended")
        if not await self.group.freeze():  # at once and for all of them; stopping takes a look at each
            self._stopped += await pausing.stop(self.pid)

    async def resume(self) -> None:
        await self.group.thaw()
        stopped, self._stopped = self._stopped, []
        pausing.resume(stopped)


class BubblewrapDriver:
    """Starts machines with bubblewrap."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._verdict: Probe | None = None
        self._probing = anyio.Lock()

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None:
                self._verdict = await probe.probe(limits.detect())
            return self._verdict

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        verdict = await self.probe()
        if not verdict.usable:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(
                limits.machine_group(self._config.run_dir, spec.id, _ceilings(spec))
            )
            process = await _start(stack, spec, group)
            await _hand_over(spec, process)
            yield BubblewrapMachine(spec, process, group)

    async def aclose(self) -> None:
        pass  # it holds nothing


async def _start(stack: AsyncExitStack, spec: MachineSpec, group: limits.ControlGroup) -> RunningProcess:
    binary = find_tool(command.PROGRAM)
    assert binary is not None  # the probe found it
    confined = probe.confinement(spec.root)
    box = command.machine_box(spec, probe.place_of(spec.root, confined))
    first = agent.agent_argv("--user", "none", "--own-pids", "--memory-mb", str(spec.memory_mb))
    with command.prepared(binary, box, command.started(_process_limits(spec), first)) as start:
        return await stack.enter_async_context(
            spawn(
                group.wrap(start.argv),
                confinement=confined,
                before_start=group.add,
                pass_fds=start.files,
                talks=True,
            )
        )


async def _hand_over(spec: MachineSpec, process: RunningProcess) -> None:
    """Wait until the machine is up, and give it its agent."""
    assert isinstance(spec.boot, GuestCode)  # as `capabilities` says
    try:
        with anyio.fail_after(START_S):
            await process.stream.receive(len(command.READY))
            await agent.send_code(process.stream, spec.boot.archive)
    except TimeoutError as error:
        raise LaunchFailed(f"machine {spec.id} did not start in {START_S:.0f} s: {process.tail}") from error
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
        raise LaunchFailed(f"machine {spec.id} did not start: {await process.wait()}") from error


def _ceilings(spec: MachineSpec) -> Limits:
    """What the host grants a machine; what it writes is memory too."""
    megabytes = spec.memory_mb + sum(command.scratch_mb(spec.disk_mb).values()) + OVERHEAD_MB
    return Limits(memory_bytes=megabytes * MIB, cpus=spec.vcpus, pids=PROCESSES)


def _process_limits(spec: MachineSpec) -> dict[int, int]:
    """What each process may have, and how many there may be: they hold without control groups too."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_FSIZE: spec.disk_mb * MIB}
    if limits.counts_apart():
        wanted[resource.RLIMIT_NPROC] = PROCESSES
    ours = {kind: resource.getrlimit(kind)[1] for kind in wanted}  # nobody can have more than we can
    return {
        kind: most if ours[kind] == resource.RLIM_INFINITY else min(most, ours[kind]) for kind, most in wanted.items()
    }
