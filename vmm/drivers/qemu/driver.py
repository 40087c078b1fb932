"""QEMU microVMs: each has its own kernel, on KVM or, where the host has none, on an emulated CPU."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketStream
from qemu.qmp import QMPClient, QMPError

from vmm import cpu, limits, memory, tsc
from vmm.driver import DriverConfig, Machine, check_network
from vmm.drivers.qemu import INFO, command, probe
from vmm.drivers.qemu.probe import Engine
from vmm.errors import DriverUnavailable, LaunchFailed, MachineLost, SnapshotFailed
from vmm.machine import ProcessMachine
from vmm.network.nat import Nat
from vmm.process import REAP_S, RunningProcess, spawn
from vmm.snapshot_files import reading
from vmm.trust import read_trusted, trusted
from vmm.types import Accel, GuestKernel, Limits, MachineSpec, NetworkMode, Probe, Snapshot

MIB = 1024 * 1024
MONITOR_S = 20.0  # QEMU's monitor answers in 40 ms; a busy host needs much longer
SAVE_S = 60.0  # device state is 60 KB; with memory in it, hundreds of megabytes
UNLIMITED = 1 << 40  # bytes per second: the state goes to a file, not over a network
MEMORY, STATE, DISK, TSC_KHZ = "memory", "state", "disk", "tsc_khz"  # the files of a snapshot
RATE_TOLERANCE = 0.001  # two measurements differ by 0.0001 %, two models of CPU by more than this


@dataclass(frozen=True, slots=True)
class Backing:
    """The anonymous files behind a machine."""

    memory: int
    disk: int
    shared: bool  # the guest's writes reach `memory`, so it can be saved from there


class QemuMachine(ProcessMachine):
    """A running QEMU process."""

    def __init__(
        self,
        spec: MachineSpec,
        process: RunningProcess,
        group: limits.ControlGroup,
        monitor: QMPClient,
        agent: socket.socket,
        backing: Backing,
    ) -> None:
        super().__init__(spec, process, group)
        self.backing = backing
        self._monitor = monitor
        self._agent: socket.socket | None = agent

    async def connect(self) -> ByteStream:
        if self._agent is None:
            raise MachineLost(f"the agent's stream of machine {self.id} was already taken")
        agent, self._agent = self._agent, None
        return await SocketStream.from_socket(agent)

    async def execute(self, name: str, arguments: dict[str, object] | None = None) -> Any:  # noqa: ANN401 - its answers are JSON
        """Run a QMP command; raise MachineLost."""
        try:
            with anyio.fail_after(MONITOR_S):
                return await self._monitor.execute(name, arguments)
        except (QMPError, TimeoutError, OSError) as error:
            raise MachineLost(f"QEMU's {name} failed for machine {self.id}: {error}") from error

    async def send_file(self, name: str, file: int) -> None:
        """Pass QEMU an open file under a name that QMP commands can use."""
        self._monitor.send_fd_scm(file)
        await self.execute("getfd", {"fdname": name})

    def close(self) -> None:
        """Close the agent's stream if it was not taken."""
        if self._agent is not None:
            self._agent.close()


class QemuDriver:
    """Starts, saves and restores QEMU microVMs."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._verdict: Probe | None = None
        self._engine: Engine | None = None
        self._probing = anyio.Lock()
        self._sealed = memory.SealedMemory()  # one copy for all machines
        self._nat = Nat(config.nat, config.run_dir)

    async def probe(self) -> Probe:
        async with self._probing:
            if self._verdict is None:
                await anyio.to_thread.run_sync(tsc.tsc_khz)  # takes 50 ms the first time
                self._verdict, self._engine = await probe.probe(self._config, limits.detect())
            return self._verdict

    async def fingerprint(self) -> str:
        engine, accel = await self._usable()
        return f"{engine.version} {accel} {cpu.model()} {command.recipe(accel)}"

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        async with AsyncExitStack() as stack:
            ram = memory.owned_space(stack, memory.new_memory(spec.memory_mb * MIB))
            disk = memory.owned_space(stack, await memory.new_disk(self._run_dir(), spec.disk_mb * MIB))
            assert isinstance(spec.boot, GuestKernel)  # as `capabilities` says
            yield await self._start(stack, spec, Backing(ram, disk, shared=True), boot=spec.boot)

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        if not isinstance(machine, QemuMachine):
            raise SnapshotFailed(f"machine {machine.id} was not started by this driver")
        async with machine.saving():
            try:
                await self._save(machine, dst)
            finally:
                if keep:  # even if saving failed; if the machine is lost, the next request to it says so
                    with anyio.CancelScope(shield=True), suppress(MachineLost):
                        await machine.execute("cont")
        return Snapshot(driver=self.name, path=dst)

    async def _save(self, machine: QemuMachine, dst: Path) -> None:
        # A machine that runs while its state is saved also runs after a restore.
        with (dst / STATE).open("xb") as state:
            # A clone's changed pages are in no file, so they go into the state.
            await machine.execute("migrate-set-capabilities", _ignore_shared(on=machine.backing.shared))
            await machine.execute("migrate-set-parameters", {"max-bandwidth": UNLIMITED})
            await machine.send_file("state", state.fileno())
            await machine.execute("migrate", {"uri": "fd:state"})
            await _migrated(machine)
        spec = machine.spec
        if machine.backing.shared:
            await anyio.to_thread.run_sync(
                memory.save_sparse, machine.backing.memory, dst / MEMORY, spec.memory_mb * MIB
            )
        await anyio.to_thread.run_sync(memory.save_sparse, machine.backing.disk, dst / DISK, spec.disk_mb * MIB)
        (dst / TSC_KHZ).write_text(str(tsc.tsc_khz()))
        cpu.record(dst)

    @asynccontextmanager
    async def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        async with AsyncExitStack() as stack:
            size = spec.memory_mb * MIB
            with reading(snapshot):
                _, accel = await self._usable()
                if accel is Accel.TCG:
                    _check_rate(read_trusted(snapshot.path / TSC_KHZ).decode())
                else:
                    cpu.check(snapshot)
                state = stack.enter_context(trusted(snapshot.path / STATE))
                if (snapshot.path / MEMORY).exists():
                    # The snapshot of a resumed sandbox is removed while its machine runs.
                    stack.push_async_callback(self._sealed.sweep)
                    sealed = await self._sealed.get(snapshot.path / MEMORY, size)
                    ram, shared = memory.owned(stack, os.dup(sealed)), False
                else:  # the memory is in the state
                    ram, shared = memory.owned_space(stack, memory.new_memory(size)), True
                copy = partial(memory.scratch_copy, snapshot.path / DISK, self._run_dir())
                disk = memory.owned_space(stack, await anyio.to_thread.run_sync(copy))
            machine = await self._start(stack, spec, Backing(ram, disk, shared))
            await machine.execute("migrate-set-capabilities", _ignore_shared(on=not shared))
            await machine.send_file("state", state)
            await machine.execute("migrate-incoming", {"uri": "fd:state"})
            yield machine

    async def aclose(self) -> None:
        self._sealed.close()

    async def _start(
        self, stack: AsyncExitStack, spec: MachineSpec, backing: Backing, boot: GuestKernel | None = None
    ) -> QemuMachine:
        """Start QEMU on the given files, booting a kernel or waiting for a state, and connect to its monitor."""
        engine, accel = await self._usable()
        ours, agent = _socket_pair(stack)
        control, monitor = _socket_pair(stack)
        boots = [boot.vmlinuz, boot.initramfs] if boot else []
        image, *kernel = (stack.enter_context(trusted(file)) for file in (spec.root, *boots))
        files = command.Descriptors(backing.memory, image, backing.disk, agent.fileno(), monitor.fileno(), *kernel)
        device = None
        if spec.network is NetworkMode.NAT:
            device, tap = await stack.enter_async_context(self._nat.tap(spec.id))
            files = replace(files, tap=tap)
        argv = command.machine_argv(engine.binary, spec, accel, files, shared=backing.shared, tsc_khz=tsc.tsc_khz())
        wanted = replace(_limits(spec), own_user=not engine.namespaces)  # they have their own limit on threads
        group = await stack.enter_async_context(limits.machine_group(self._config.run_dir, spec.id, wanted))
        process = await stack.enter_async_context(
            spawn(
                group.wrap(engine.command(argv, accel)),
                confinement=engine.confinement(accel),
                before_start=group.add,
                pass_fds=files.all(),
            )
        )
        agent.close()
        monitor.close()
        client = await _greet(stack, spec, process, control)
        machine = QemuMachine(spec, process, group, client, ours, backing)
        machine.device = device
        stack.push_async_callback(machine.let_end)
        stack.callback(machine.close)
        return machine

    async def _usable(self) -> tuple[Engine, Accel]:
        verdict = await self.probe()
        if self._engine is None or not verdict.usable or verdict.accel is None:
            raise DriverUnavailable(verdict.reason, fix=verdict.fix)
        return self._engine, verdict.accel

    def _run_dir(self) -> Path:
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        return self._config.run_dir


def _socket_pair(stack: AsyncExitStack) -> tuple[socket.socket, socket.socket]:
    """Return our end and QEMU's. The stack closes both."""
    ours, theirs = socket.socketpair()
    stack.callback(ours.close)
    stack.callback(theirs.close)
    return ours, theirs


def _ignore_shared(*, on: bool) -> dict[str, object]:
    """Return the QMP arguments that keep shared memory out of the state: it is saved and mapped as a file instead."""
    return {"capabilities": [{"capability": "x-ignore-shared", "state": on}]}


def _limits(spec: MachineSpec) -> Limits:
    return Limits(
        memory_bytes=spec.host_bytes,
        cpus=spec.vcpus,
        pids=command.THREADS,
        file_bytes=max(spec.memory_mb, spec.disk_mb) * MIB,
        data_bytes=spec.host_bytes + command.THREADS * command.STACK_MB * MIB,
        own_user=True,
    )


def _check_rate(taken_khz: str) -> None:
    """Raise SnapshotFailed if this host's clock rate differs: an emulated guest keeps the rate of its first host."""
    here = tsc.tsc_khz()
    if here is None or not taken_khz.isdigit():
        return
    if abs(int(taken_khz) - here) > RATE_TOLERANCE * here:
        raise SnapshotFailed("the snapshot was taken on a host with another clock rate; build the template again")


async def _greet(
    stack: AsyncExitStack, spec: MachineSpec, process: RunningProcess, control: socket.socket
) -> QMPClient:
    client = QMPClient(spec.id)
    control.setblocking(False)
    try:
        with anyio.fail_after(MONITOR_S):
            await client.connect(control)
    except (QMPError, OSError, TimeoutError, EOFError) as error:
        raise LaunchFailed(f"QEMU did not start for machine {spec.id}: {process.tail or error}") from error
    client.events.names.add("SHUTDOWN")  # without a filter it would queue every event that a guest can cause
    stack.push_async_callback(_leave, client)
    return client


async def _leave(client: QMPClient) -> None:
    with anyio.move_on_after(REAP_S, shield=True), suppress(QMPError, OSError, EOFError):
        await client.disconnect()


async def _migrated(machine: QemuMachine) -> None:
    """Wait until the state is written; raise SnapshotFailed."""
    with anyio.fail_after(SAVE_S):
        while True:
            status = (await machine.execute("query-migrate")).get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise SnapshotFailed(f"QEMU could not save machine {machine.id}")
            await anyio.sleep(0.005)  # QEMU has an event for this, but writing takes only 20 ms
