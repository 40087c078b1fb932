"""What drivers of microVMs have in common: each adds the requests that its monitor understands."""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.to_thread

from vmm import cpu, limits, memory
from vmm.driver import DriverConfig, Machine, check_network
from vmm.errors import DriverUnavailable, LaunchFailed, MachineLost, SnapshotFailed
from vmm.microvm import api, layout, probe
from vmm.microvm.api import Refused, Request
from vmm.microvm.layout import DISK, IMAGE, INITRAMFS, KERNEL, MEMORY
from vmm.microvm.machine import MicroVm
from vmm.microvm.probe import Engine, Monitor, Release
from vmm.probe import kvm_confinement
from vmm.process import NOWHERE, spawn
from vmm.snapshot_files import reading
from vmm.trust import read_trusted, trusted
from vmm.types import Exit, GuestKernel, Limits, MachineSpec, Probe, Snapshot
from vmm.vmlinux import uncompressed

MIB = 1024 * 1024
PROBE_MB = 128  # of a machine that only boots
TAKE_ANOTHER = (
    "; if it always fails, this host's kernel or KVM is not the snapshot's any more: "
    "`mcp-sandbox template remove` the template, then build it"
)
STACK_MB = 8  # of a thread
SAVE_S = 120.0  # the monitor writes all memory: that of a small machine
SAVE_MB_PER_S = 30  # and to a slow disk
TRY_AGAIN_S = 60.0  # after a probe that failed, perhaps because the host was busy; it can take 15 s
# The most that we read of a state. Honest ones have 200 KB; to parse 8 MB would hold up the server for a second.
STATE_BYTES, STATE_BYTES_PER_CPU = MIB, MIB // 16
SAVED_MEMORY, SAVED_STATE, SAVED_DISK = "memory", "state", "disk"  # the files of a snapshot


class MicroVmDriver(ABC):
    """Starts, saves and restores machines of one monitor."""

    monitor: ClassVar[Monitor]
    pausing: ClassVar[Request]
    resuming: ClassVar[Request]
    machine_type: ClassVar[type[MicroVm]] = MicroVm
    # Where the monitor writes snapshots: to unnamed files on disk, or to a directory of the machine's own root.
    saves_to_files: ClassVar[Sequence[str]] = ()
    saves_to_folder: ClassVar[str | None] = None

    def __init__(self, config: DriverConfig) -> None:
        self.name = self.monitor.info.name
        self.capabilities = self.monitor.info.capabilities
        self._config = config
        self._title = self.monitor.info.title
        self._verdict: Probe | None = None
        self._try_again_at = 0.0
        self._engine: Engine | None = None
        self._probing = anyio.Lock()
        self._sealed = memory.SealedMemory()  # one copy for all machines

    @abstractmethod
    def argv(self, program: str) -> Sequence[str]:
        """Return the command that starts the monitor, which waits for requests."""

    @abstractmethod
    def boot(self, spec: MachineSpec) -> Sequence[Request]:
        """Return the requests that configure and start a new machine."""

    @abstractmethod
    def try_kernel(self, spec: MachineSpec) -> Sequence[Request]:
        """Return the requests that boot a machine without disks, which prints a word and ends."""

    @abstractmethod
    def load(self, release: Release) -> Sequence[Request]:
        """Return the requests that continue a saved machine, for a release of the monitor."""

    @abstractmethod
    def state_files(self, spec: MachineSpec, state: bytes) -> Mapping[str, bytes]:
        """Return the files besides memory that the monitor loads, by their names in the machine."""

    async def prepare(self, machine: MicroVm) -> None:  # noqa: B027 - most have nothing to do
        """Do what a machine that is to be saved need not stand still for. Raises OSError."""

    @abstractmethod
    async def save(self, machine: MicroVm, dst: Path) -> None:
        """Save a machine that stands still; raise Refused, OSError, SnapshotFailed or MachineLost."""

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None or (not self._verdict.usable and anyio.current_time() >= self._try_again_at):
                found = await probe.probe(self.monitor, self._config, limits.detect(), self._boot_alone)
                self._verdict, self._engine = found
                self._try_again_at = anyio.current_time() + TRY_AGAIN_S
            return self._verdict

    async def _boot_alone(self, engine: Engine, kernel: GuestKernel) -> Exit:
        """Boot a guest that prints a word and ends; return how. Raises LaunchFailed."""
        name = f"probe-{secrets.token_hex(4)}"  # several event loops of a process may probe at the same time
        spec = MachineSpec(name, Path(NOWHERE), kernel, memory_mb=PROBE_MB, vcpus=1, disk_mb=1)
        async with AsyncExitStack() as stack:
            machine = await self._start(stack, engine, spec, await _kernel_files(stack, kernel))
            await self._ask_all(machine, self.try_kernel(spec), "start")
            machine.boot_once()
            return await machine.wait()

    async def fingerprint(self) -> str:
        return f"{(await self.usable()).version} {cpu.model()} {layout.recipe(self.boot)}"

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        assert isinstance(spec.boot, GuestKernel)  # as `capabilities` says
        async with AsyncExitStack() as stack:
            disk = memory.owned_space(stack, await memory.new_disk(self.run_dir(), spec.disk_mb * MIB))
            read = {IMAGE: stack.enter_context(trusted(spec.root)), **await _kernel_files(stack, spec.boot)}
            machine = await self._start(stack, await self.usable(), spec, read, {DISK: disk})
            await self._ask_all(machine, self.boot(spec), "start")
            machine.boot_once()
            yield machine

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        if not isinstance(machine, MicroVm):
            raise SnapshotFailed(f"machine {machine.id} was not started by this driver")
        async with machine.saving():
            try:
                await self.prepare(machine)
                async with machine.disconnected() if keep else nullcontext():
                    await self._save(machine, dst, keep=keep)
            except (Refused, OSError) as error:
                raise SnapshotFailed(f"{self._title} could not save machine {machine.id}: {error}") from error
        return Snapshot(driver=self.name, path=dst)

    async def _save(self, machine: MicroVm, dst: Path, *, keep: bool) -> None:
        """Save a machine. If it is to be kept, it goes on, even if saving fails.

        Firecracker 1.16 must not be told to go on without a snapshot since it last did: it would hold back all data for
        the guest until that has seen its connections reset. So nothing comes between the pause and the snapshot.
        """
        await machine.control.ask(self.pausing)
        try:
            await self.save(machine, dst)
            cpu.record(dst)
        finally:
            if keep:
                with anyio.CancelScope(shield=True), suppress(MachineLost, Refused):  # the next request notices
                    await machine.control.ask(self.resuming)

    @asynccontextmanager
    async def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        async with AsyncExitStack() as stack:
            with reading(snapshot):
                cpu.check(snapshot)
                # The snapshot of a resumed sandbox is removed while its machine runs.
                stack.push_async_callback(self._sealed.sweep)
                sealed = await self._sealed.get(snapshot.path / SAVED_MEMORY, spec.memory_mb * MIB)
                read = {MEMORY: memory.owned(stack, os.dup(sealed))}
                # Copies in memory: the machine's user may not open files of the home.
                for name, content in self.state_files(spec, read_trusted(snapshot.path / SAVED_STATE)).items():
                    read[name] = memory.owned(stack, memory.sealed_bytes(content))
                copy = partial(memory.scratch_copy, snapshot.path / SAVED_DISK, self.run_dir())
                disk = memory.owned_space(stack, await anyio.to_thread.run_sync(copy))
            read[IMAGE] = stack.enter_context(trusted(spec.root))
            engine = await self.usable()
            machine = await self._start(stack, engine, spec, read, {DISK: disk})
            await self._ask_all(machine, self.load(engine.release), "restore", TAKE_ANOTHER)
            machine.restored()
            yield machine

    async def aclose(self) -> None:
        self._sealed.close()

    async def usable(self) -> Engine:
        """Return the monitor of this host; raise DriverUnavailable."""
        verdict = await self.probe()
        if self._engine is None or not verdict.usable:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        return self._engine

    def run_dir(self) -> Path:
        """Return the directory for scratch files."""
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        return self._config.run_dir

    async def _start(
        self,
        stack: AsyncExitStack,
        engine: Engine,
        spec: MachineSpec,
        read: Mapping[str, int],
        written: Mapping[str, int] = {},
    ) -> MicroVm:
        """Start the monitor on files that it reads or writes, and connect to its API. It waits for requests."""
        if spec.vcpus > (most := self.monitor.most_vcpus):
            problem = f"{self._title} gives machines at most {most} CPUs, not {spec.vcpus}"
            raise LaunchFailed(f"{problem}: change the template's vcpus, or set driver = qemu")
        confinement = kvm_confinement(offline=False)  # its namespaces include an empty network
        new = {name: memory.owned_space(stack, memory.scratch_file(self.run_dir(), 0)) for name in self.saves_to_files}
        for file in (*written.values(), *new.values()):
            os.fchmod(file, 0o666)  # it has no name; the machine's user opens it again by its descriptor
        named = {**read, **written, **new}
        program = stack.enter_context(trusted(Path(engine.binary)))
        argv = self.argv(f"/proc/self/fd/{program}")
        folder, folder_mb = self.saves_to_folder, spec.memory_mb
        confined = probe.in_machine(argv, named, vcpus=spec.vcpus, folder=folder, folder_mb=folder_mb)
        group = await stack.enter_async_context(
            limits.machine_group(self._config.run_dir, spec.id, machine_limits(spec))
        )
        process = await stack.enter_async_context(
            spawn(
                group.wrap(confined),
                confinement=confinement,
                before_start=group.add,
                pass_fds=(program, *named.values()),
            )
        )
        try:
            connection = api.connected(process, self._title, self.monitor.hello)
            control, root = await stack.enter_async_context(connection)
        except (MachineLost, Refused) as error:
            raise LaunchFailed(f"{self._title} did not start for machine {spec.id}: {error}") from error
        machine = self.machine_type(spec, process, group, control, root, named)
        stack.push_async_callback(machine.let_end)
        return machine

    async def _ask_all(self, machine: MicroVm, requests: Sequence[Request], purpose: str, advice: str = "") -> None:
        """Start or restore a machine. What fails here says nothing about a snapshot, which may work the next time."""
        try:
            for request in requests:
                await machine.control.ask(request)
        except (MachineLost, Refused) as error:
            raise LaunchFailed(f"{self._title} did not {purpose} machine {machine.id}: {error}{advice}") from error


async def _kernel_files(stack: AsyncExitStack, kernel: GuestKernel) -> dict[str, int]:
    return {
        KERNEL: memory.owned(stack, await uncompressed(kernel.vmlinuz)),
        INITRAMFS: stack.enter_context(trusted(kernel.initramfs)),
    }


def save_s(spec: MachineSpec) -> float:
    """Return how long saving a machine may take."""
    return SAVE_S + spec.memory_mb / SAVE_MB_PER_S


def read_state(file: int, spec: MachineSpec) -> bytes:
    """Return the state that a monitor has written to a file; raise OSError if it is too long to be honest."""
    most = STATE_BYTES + spec.vcpus * STATE_BYTES_PER_CPU
    state = os.pread(file, most + 1, 0)
    if len(state) > most:
        raise OSError(f"it wrote more than {most} bytes of state")
    return state


def machine_limits(spec: MachineSpec) -> Limits:
    """Return what the host lets a machine use."""
    threads = spec.vcpus + probe.THREADS
    return Limits(
        memory_bytes=spec.host_bytes,
        cpus=spec.vcpus,
        pids=threads,
        file_bytes=max(spec.memory_mb, spec.disk_mb) * MIB,
        data_bytes=spec.host_bytes + threads * STACK_MB * MIB,
        own_user=True,
    )
