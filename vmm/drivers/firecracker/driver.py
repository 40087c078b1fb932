"""Firecracker microVMs: a small monitor, on KVM only."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from vmm import limits, memory, vsock
from vmm.driver import DriverConfig, Machine, check_network
from vmm.drivers.firecracker import INFO, api, probe, requests
from vmm.drivers.firecracker.api import Api, Refused
from vmm.drivers.firecracker.probe import Engine
from vmm.errors import DriverUnavailable, LaunchFailed, MachineLost, SnapshotFailed
from vmm.machine import ProcessMachine
from vmm.probe import cpu_model, kvm_confinement
from vmm.process import RunningProcess, spawn
from vmm.trust import trusted
from vmm.types import GuestKernel, Limits, MachineSpec, Probe, Snapshot
from vmm.vmlinux import uncompressed

MIB = 1024 * 1024
BOOT_S = 300.0  # a hang: a machine boots in a second, in minutes on an emulated host
RECONNECT_S = 10.0  # an agent that runs listens at once
SAVE_S = 120.0  # it writes all memory
LOOK_AGAIN_S = 0.02  # a guest that boots does not say when its agent listens; a restored one listens already
MEMORY, STATE, DISK = "memory", "state", "disk"  # the files of a snapshot


@dataclass(frozen=True, slots=True)
class Files:
    """The open files of a machine that the driver uses, too."""

    root: int  # the root directory of its namespaces, with its sockets
    disk: int
    new_memory: int  # what Firecracker saves
    new_state: int
    base: int | None  # the memory that the machine was restored from
    changes: int  # all that it has saved of changes to `base`; Firecracker saves each only once


class FirecrackerMachine(ProcessMachine):
    """A running Firecracker process."""

    def __init__(
        self, spec: MachineSpec, process: RunningProcess, group: limits.ControlGroup, control: Api, files: Files
    ) -> None:
        super().__init__(spec, process, group)
        self.control = control
        self.files = files
        self._agent: vsock.Reconnecting | None = None
        self.changes_lost = False  # Firecracker has saved changes that are in no file

    async def connect(self) -> ByteStream:
        if self._agent is not None:
            raise MachineLost(f"the agent's stream of machine {self.id} was already taken")
        self._agent = vsock.Reconnecting(await self._dial(BOOT_S))
        return self._agent

    @asynccontextmanager
    async def disconnected(self) -> AsyncIterator[None]:
        """Take a snapshot in the block, which closes the agent's connection; then connect again if it was there."""
        if self._agent is None:
            yield
            return
        async with self._agent.interrupted(partial(self._dial, RECONNECT_S)):
            yield

    async def _dial(self, within_s: float) -> ByteStream:
        """Connect to the agent as soon as it listens; raise MachineLost if the machine ends before."""
        with anyio.move_on_after(within_s):
            while True:
                try:
                    return await vsock.connect(self.files.root, requests.AGENT_SOCKET)
                except ConnectionRefusedError:
                    with anyio.move_on_after(LOOK_AGAIN_S):
                        raise MachineLost(f"machine {self.id} ended with {await self.wait()}") from None
        raise MachineLost(f"no agent listens in machine {self.id} after {within_s:.0f} s")


class FirecrackerDriver:
    """Starts, saves and restores Firecracker microVMs."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._verdict: Probe | None = None
        self._engine: Engine | None = None
        self._probing = anyio.Lock()
        self._sealed = memory.SealedMemory()  # one copy for all machines

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None:
                self._verdict, self._engine = await probe.probe(self._config, limits.detect())
            return self._verdict

    async def fingerprint(self) -> str:
        return f"{(await self._usable()).version} {cpu_model()} {requests.recipe()}"

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        assert isinstance(spec.boot, GuestKernel)  # as `capabilities` says
        async with AsyncExitStack() as stack:
            disk = memory.owned(stack, await memory.new_disk(self._run_dir(), spec.disk_mb * MIB))
            boots = {
                requests.KERNEL: memory.owned(stack, await uncompressed(spec.boot.vmlinuz)),
                requests.INITRAMFS: stack.enter_context(trusted(spec.boot.initramfs)),
            }
            machine = await self._start(stack, spec, disk, boots)
            try:
                for path, body in requests.boot(spec):
                    await machine.control.ask("PUT", path, body)
            except Refused as error:
                raise LaunchFailed(f"Firecracker did not start machine {spec.id}: {error}") from error
            yield machine

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        if not isinstance(machine, FirecrackerMachine):
            raise SnapshotFailed(f"machine {machine.id} was not started by this driver")
        await machine.control.ask("PATCH", "/vm", {"state": "Paused"})
        if not keep:
            await _save(machine, dst)
            return Snapshot(driver=self.name, path=dst)
        async with machine.disconnected():
            try:
                await _save(machine, dst)
            finally:  # even if saving failed; if the machine is lost, the next request to it says so
                with anyio.CancelScope(shield=True), suppress(MachineLost, Refused):
                    await machine.control.ask("PATCH", "/vm", {"state": "Resumed"})
        return Snapshot(driver=self.name, path=dst)

    @asynccontextmanager
    async def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        async with AsyncExitStack() as stack:
            with _reading(snapshot):
                stack.callback(self._sealed.sweep)  # a resumed sandbox's snapshot is removed while its machine runs
                saved = {
                    requests.MEMORY: memory.owned(stack, os.dup(await self._sealed.get(snapshot.path / MEMORY))),
                    requests.STATE: stack.enter_context(trusted(snapshot.path / STATE)),
                }
                copy = partial(memory.scratch_copy, snapshot.path / DISK, self._run_dir())
                disk = memory.owned(stack, await anyio.to_thread.run_sync(copy))
            machine = await self._start(stack, spec, disk, saved)
            try:
                await machine.control.ask("PUT", *requests.load())
            except Refused as error:
                raise SnapshotFailed(f"Firecracker did not restore machine {spec.id}: {error}") from error
            yield machine

    async def aclose(self) -> None:
        self._sealed.close()

    async def _start(
        self, stack: AsyncExitStack, spec: MachineSpec, disk: int, files: dict[str, int]
    ) -> FirecrackerMachine:
        """Start Firecracker on the given files, and connect to its API. It waits for what it is asked to do."""
        engine = await self._usable()
        confinement = kvm_confinement(offline=False)  # its namespaces include an empty network
        # On disk: memory that Firecracker writes counts against its limit.
        new_memory, new_state, changes = (
            memory.owned(stack, memory.scratch_file(self._run_dir(), 0)) for _ in range(3)
        )
        for file in (disk, new_memory, new_state):
            os.fchmod(file, 0o666)  # it has no name; the machine's user opens it again by its descriptor
        named = {
            **files,
            requests.IMAGE: stack.enter_context(trusted(spec.root)),
            requests.DISK: disk,
            requests.NEW_MEMORY: new_memory,
            requests.NEW_STATE: new_state,
        }
        program = stack.enter_context(trusted(Path(engine.binary)))
        argv = [f"/proc/self/fd/{program}", "--api-sock", f"/{requests.API_SOCKET}", "--id", "machine"]
        group = await stack.enter_async_context(limits.machine_group(self._config.run_dir, spec.id, _limits(spec)))
        process = await stack.enter_async_context(
            spawn(
                group.wrap(probe.in_machine(argv, named)),
                confinement=confinement,
                before_start=group.add,
                pass_fds=(program, *named.values()),
            )
        )
        try:
            control, root = await stack.enter_async_context(api.connected(process, requests.API_SOCKET))
        except MachineLost as error:
            raise LaunchFailed(f"Firecracker did not start for machine {spec.id}: {error}") from error
        open_files = Files(root, disk, new_memory, new_state, files.get(requests.MEMORY), changes)
        machine = FirecrackerMachine(spec, process, group, control, open_files)
        stack.push_async_callback(machine.let_end)
        return machine

    async def _usable(self) -> Engine:
        verdict = await self.probe()
        if self._engine is None or not verdict.usable:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        return self._engine

    def _run_dir(self) -> Path:
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        return self._config.run_dir


async def _save(machine: FirecrackerMachine, dst: Path) -> None:
    """Save a machine that stands still. Firecracker writes to files of ours: it does not know where snapshots are."""
    files = machine.files
    if machine.changes_lost:
        raise SnapshotFailed(f"machine {machine.id} cannot be copied any more: an earlier copy could not be written")
    try:
        await machine.control.ask("PUT", *requests.save(changes_only=files.base is not None), wait_s=SAVE_S)
        machine.changes_lost = True  # until they are kept
        await anyio.to_thread.run_sync(_keep_changes, files)
        machine.changes_lost = False
        await anyio.to_thread.run_sync(_keep, files, dst)
    except (Refused, OSError) as error:
        raise SnapshotFailed(f"Firecracker could not save machine {machine.id}: {error}") from error
    finally:
        for file in (files.new_memory, files.new_state):
            os.ftruncate(file, 0)


def _keep_changes(files: Files) -> None:
    if files.base is not None:
        memory.copy_data(files.new_memory, files.changes)


def _keep(files: Files, dst: Path) -> None:
    if files.base is None:
        memory.save_sparse(files.new_memory, dst / MEMORY)
    else:
        memory.save_sparse(files.base, dst / MEMORY)
        with (dst / MEMORY).open("r+b") as target:
            memory.copy_data(files.changes, target.fileno())
    memory.save_sparse(files.new_state, dst / STATE)
    memory.save_sparse(files.disk, dst / DISK)


def _limits(spec: MachineSpec) -> Limits:
    return Limits(
        memory_bytes=spec.host_bytes,
        cpus=spec.vcpus,
        pids=probe.THREADS,
        file_bytes=max(spec.memory_mb, spec.disk_mb) * MIB,
        data_bytes=spec.host_bytes + probe.THREADS * 8 * MIB,
        own_user=True,
    )


@contextmanager
def _reading(snapshot: Snapshot) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotFailed(f"the snapshot in {snapshot.path} cannot be read: {error}") from error
