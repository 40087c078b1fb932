"""gVisor machines: each has its own application kernel in front of the host's kernel, and runs at native speed.

A machine is a tree of processes in its own namespaces. It inherits the image, the checkpoint and gVisor's program as
open files, and its state is in a tmpfs that ends with it.
"""

import math
import os
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio

from vmm import cpu, limits
from vmm.agent import send_code
from vmm.driver import DriverConfig, Machine, check_network
from vmm.drivers.gvisor import INFO, command, memory, probe
from vmm.drivers.gvisor.probe import Engine
from vmm.errors import DriverUnavailable, LaunchFailed, MachineLost, SnapshotFailed, ToolFailed
from vmm.machine import StdioMachine
from vmm.memory import sealed_bytes
from vmm.network.nat import Nat
from vmm.process import RunningProcess, run_tool, spawn
from vmm.process_table import children_of, with_descendants
from vmm.snapshot_files import reading
from vmm.trust import trusted
from vmm.types import Exit, GuestCode, Limits, MachineSpec, NetworkMode, Probe, Snapshot, Usage
from vmm.usage import cpu_s, memory_of

MIB = 1024 * 1024
CONTROL_S = 20.0  # gVisor answers in 30 ms; a busy host needs much longer
SAVE_S = 120.0  # a checkpoint of 100 MB takes 0.3 s
IMAGE = "checkpoint"  # gVisor's directory in a snapshot
MEMORY_STEP = 1024 * MIB  # by which gVisor extends the file that holds a machine's memory
# gVisor places the memory of each process in pieces of 2 MB, most of them empty. 160 processes need so much of the file
# besides what they use; with less, the machine crashed at 60.
SPREAD = 2 * MEMORY_STEP
# What gVisor's kernel keeps of its own, such as inodes and full socket buffers. It starts with 50 MB and grows in steps
# of 64 MB. In large machines there may be more of everything.
SENTRY_DATA_MB, SENTRY_DATA_SHARE = 256, 4
GO_CRASHED = 2  # the exit code of a Go program that gets no memory
PRIVATE_DIR = 0o700
READABLE = 0o644  # machines of root run as other users, who open these files again through descriptors


class GvisorMachine(StdioMachine):
    """A running gVisor sandbox."""

    def __init__(
        self, spec: MachineSpec, process: RunningProcess, group: limits.ControlGroup, runsc: list[str], uid: int
    ) -> None:
        super().__init__(spec, process, group)
        self.uid = uid  # of its processes on the host
        self._runsc = runsc

    async def start_agent(self, archive: Path) -> None:
        """Send the machine its agent."""
        try:
            await send_code(self.process.stream, archive)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise LaunchFailed(f"gVisor did not start machine {self.id}: {await self.wait()}") from error

    async def wait(self) -> Exit:
        end = await super().wait()
        if end.code == GO_CRASHED and not end.detail:
            return replace(end, detail="gVisor's kernel crashed, as it does when it exceeds its memory limit")
        return end

    def _measure(self) -> Usage:
        """Count the machine's memory file as a whole: no process need have its pages mapped."""
        pids = with_descendants(self.pid)
        sizes, sentry = memory_of(pids), memory.find_sentry(pids)
        anonymous = sizes["Pss_Anon"]
        with suppress(OSError):  # it has just ended
            anonymous += memory.file_bytes(sentry.memory_file) if sentry else 0
        return Usage(memory_bytes=anonymous + sizes["Pss_File"], private_bytes=anonymous, cpu_s=cpu_s(pids))

    async def control(self, *order: str, pass_fds: tuple[int, ...] = (), timeout_s: float = CONTROL_S) -> None:
        """Run a runsc command on this machine; raise MachineLost."""
        first = children_of(self.pid)
        if not first:
            raise MachineLost(f"machine {self.id} has ended")
        program = int(self._runsc[0].rpartition("/")[2])
        argv = command.enter_argv(first[0], self.uid, [*self._runsc, *order, command.NAME])
        try:
            with anyio.fail_after(timeout_s):
                await run_tool(argv, pass_fds=(program, *pass_fds))
        except (ToolFailed, TimeoutError) as error:
            why = error.gist if isinstance(error, ToolFailed) else f"it took longer than {timeout_s:g} s"
            raise MachineLost(f"runsc {order[0]} failed for machine {self.id}: {why}") from error


class GvisorDriver:
    """Starts, saves and restores gVisor sandboxes."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._probing = anyio.Lock()
        self._verdict: Probe | None = None
        self._engine: Engine | None = None
        self._nat = Nat(config.nat, config.run_dir)

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None:
                self._verdict, self._engine = await probe.probe(self._config, limits.detect())
            return self._verdict

    async def fingerprint(self) -> str:
        engine = await self._found_engine()
        return f"{engine.release.version} {engine.platform} {cpu.model()} {command.recipe()}"

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        assert isinstance(spec.boot, GuestCode)  # as `capabilities` says
        async with AsyncExitStack() as stack:
            machine = await self._start(stack, spec, ["run"], {})
            await machine.start_agent(spec.boot.archive)
            yield machine

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        if not isinstance(machine, GvisorMachine):
            raise SnapshotFailed(f"machine {machine.id} was not started by this driver")
        save = (await self._found_engine()).release.arguments("checkpoint")
        image = dst / IMAGE
        image.mkdir()
        os.chown(image, machine.uid, machine.uid)
        async with machine.saving():
            with _opened(image) as directory:
                options = [*save, *(["--leave-running"] if keep else []), f"--image-path=/proc/self/fd/{directory}"]
                try:
                    await machine.control("checkpoint", *options, pass_fds=(directory,), timeout_s=SAVE_S)
                    _take_over(image)
                except (MachineLost, OSError) as error:
                    raise SnapshotFailed(str(error)) from error
        return Snapshot(driver=self.name, path=dst)

    @asynccontextmanager
    async def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        async with AsyncExitStack() as stack:
            with reading(snapshot):
                checkpoint = {
                    path.name: stack.enter_context(trusted(path)) for path in (snapshot.path / IMAGE).iterdir()
                }
            options = (await self._found_engine()).release.arguments("restore")
            order = ["restore", *options, f"--image-path={command.CHECKPOINT}"]
            yield await self._start(stack, spec, order, checkpoint)

    async def aclose(self) -> None:
        """Do nothing: the driver holds nothing between machines."""

    async def _start(
        self, stack: AsyncExitStack, spec: MachineSpec, order: list[str], checkpoint: Mapping[str, int]
    ) -> GvisorMachine:
        engine = await self._found_engine()
        program = stack.enter_context(probe.opened_binary(self._config, engine.binary))
        root = stack.enter_context(trusted(spec.root))
        config = sealed_bytes(command.config_json(spec, f"/proc/self/fd/{root}"))
        stack.callback(os.close, config)
        runsc = engine.argv(program, spec.network)
        group = await stack.enter_async_context(limits.machine_group(self._config.run_dir, spec.id, _limits(spec)))
        confinement = probe.confinement()
        nat = spec.network is NetworkMode.NAT
        start = [*runsc, *order, f"--bundle={command.BUNDLE}", command.NAME]
        argv = command.in_machine(start, config, checkpoint, memory_mb=spec.memory_mb, gated=nat)
        process = await stack.enter_async_context(
            spawn(
                group.wrap(argv),
                confinement=confinement,
                before_start=group.add,
                pass_fds=(program, root, config, *checkpoint.values()),
                stdio=True,
            )
        )
        uid = os.geteuid() if confinement.uid is None else confinement.uid
        machine = GvisorMachine(spec, process, group, runsc, uid)
        stack.push_async_callback(machine.let_end)
        if not group.bounds_memory:
            stack.enter_context(machine.watched(memory.find_sentry))
        if nat:
            machine.device = await stack.enter_async_context(self._nat.veth(spec.id, process))
        return machine

    async def _found_engine(self) -> Engine:
        verdict = await self.probe()
        if self._engine is None:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        return self._engine


def _limits(spec: MachineSpec) -> Limits:
    return Limits(
        memory_bytes=spec.host_bytes,
        cpus=spec.vcpus,
        pids=command.THREADS,
        # All memory of the machine, files included, is one file.
        file_bytes=math.ceil(spec.host_bytes / MEMORY_STEP) * MEMORY_STEP + SPREAD,
        data_bytes=max(SENTRY_DATA_MB, spec.memory_mb // SENTRY_DATA_SHARE) * MIB,
    )


def _take_over(image: Path) -> None:
    """Take ownership of a checkpoint: no machine's user may own what other machines start from.

    The directory comes first, so that nothing in it can be replaced meanwhile. Only regular files are accepted.
    """
    _own(image, os.O_RDONLY | os.O_DIRECTORY, PRIVATE_DIR)
    for path in image.iterdir():
        _own(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, READABLE)


def _own(path: Path, flags: int, mode: int) -> None:
    with _opened(path, flags) as file:
        status = os.fstat(file)
        if not flags & os.O_DIRECTORY and not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            raise SnapshotFailed(f"the checkpoint contains something that is not a regular file: {path.name}")
        os.fchown(file, os.geteuid(), os.getegid())
        os.fchmod(file, mode)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or directory: the machine's user may not be able to reach its path."""
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)
