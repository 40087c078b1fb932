"""Whether a monitor can run machines on this host, found by running it."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from vmm import probe as host
from vmm.driver import DriverConfig
from vmm.errors import DriverUnavailable, LaunchFailed, Untrusted
from vmm.limits import Hierarchy, rlimit_argv
from vmm.microvm.api import Request
from vmm.namespaces import ROOT_MB, in_namespaces
from vmm.probe import (
    KVM_DEVICE,
    kvm_confinement,
    last_line,
    missing_protections,
    missing_with_kvm,
    namespace_advice,
)
from vmm.process import find_tool, spawn
from vmm.trust import trusted
from vmm.types import GUEST_KERNEL, Accel, DriverInfo, Exit, GuestKernel, Probe
from vmm.verdicts import Verdict, Verdicts

Release = tuple[int, ...]
THREADS = 32  # of a monitor besides one for each CPU: one or two for each device, and a few more
START_S = 15.0  # it prints its version in milliseconds
NOT_EXECUTABLE = "status 126"  # of a shell
MAX_SHOWN = 80  # characters of what another program prints


@dataclass(frozen=True, slots=True)
class Monitor:
    """The facts of a monitor."""

    info: DriverInfo
    program: str
    setting: str  # that names another program
    oldest: Release  # version that works
    release: str  # the address of its official releases
    check: str  # how to check what was downloaded from there
    unpack: str  # a command that installs it
    most_vcpus: int
    hello: Request  # which it always answers
    defective: Mapping[Release, str] = field(default_factory=dict)  # what is wrong with releases that do not work
    came_later: Mapping[Release, str] = field(default_factory=dict)  # what releases before these do not protect from

    @property
    def install(self) -> str:
        """Return what the operator has to do: no package has the program, and we download none."""
        return (
            f"download {self.info.title} from {self.release} (VERSION: the newest), check it {self.check}, and install "
            f"it: {self.unpack}. Or set {self.setting} to the path of one that you have"
        )

    def unprotected(self, release: Release) -> tuple[str, ...]:
        """Return what a release does not protect from, one sentence each."""
        return tuple(sentence for since, sentence in self.came_later.items() if release < since)


@dataclass(frozen=True, slots=True)
class Engine:
    """A monitor of this host."""

    binary: str
    version: str
    release: Release  # the same as numbers, to compare


async def probe(
    monitor: Monitor,
    config: DriverConfig,
    hierarchy: Hierarchy,
    boot: Callable[[Engine, GuestKernel], Awaitable[Exit]],
) -> tuple[Probe, Engine | None]:
    """Return whether a monitor can run machines here, and which one. `boot` tries a kernel, see `host.boots`."""
    if config.accel is Accel.TCG:
        fix = "remove the setting accel, or set driver = qemu"
        return Probe(False, f"accel = tcg, and {monitor.info.title} needs KVM", fix), None
    kvm = await host.kvm(config.cache_dir, own_kernel=config.own_kernel)
    if kvm.usable is False:  # then no monitor is of any use
        return Probe(False, kvm.reason, kvm.fix), None
    try:
        engine = await find(monitor, config)
    except DriverUnavailable as error:
        return Probe(False, str(error), error.fix), None
    if config.kernel is not None or kvm.usable is None:
        kvm = await _boots(monitor, config, engine, boot)
    missing = (*missing_protections(hierarchy), *missing_with_kvm(), *monitor.unprotected(engine.release))
    lacks = None if config.kernel else GUEST_KERNEL
    program = Path(engine.binary)
    if not kvm.usable:
        return Probe(False, kvm.reason, kvm.fix, version=engine.version, lacks=lacks, program=program), None
    return Probe(True, kvm.reason, None, Accel.KVM, engine.version, missing, lacks, program), engine


async def _boots(
    monitor: Monitor, config: DriverConfig, engine: Engine, boot: Callable[[Engine, GuestKernel], Awaitable[Exit]]
) -> Verdict:
    """Return whether the guest kernel boots. The monitor may not fit this host, and a kernel of the user's not KVM."""
    if (kernel := config.kernel) is None:
        return host.NO_KERNEL
    verdicts, question = Verdicts(config.cache_dir), f"whole-guest-{monitor.info.name}"
    files = [str(kernel.vmlinuz), str(kernel.initramfs)]
    find_out = partial(host.boots, partial(boot, engine, kernel), verdicts.file(question))
    try:
        circumstances = host.identity(Path(engine.binary)) | host.privileges()
        return await verdicts.ask(question, find_out, monitor=engine.version, files=files, **circumstances)
    except LaunchFailed as error:  # which says what to do, if it is known
        return Verdict(False, str(error), f"{'unset guest_kernel, or ' if config.own_kernel else ''}set driver = qemu")


async def find(monitor: Monitor, config: DriverConfig) -> Engine:
    """Return this host's monitor. It is run like that of a machine, to ask for its version.

    Raises:
        DriverUnavailable: there is none that works, or processes cannot be confined.
    """
    binary = str(config.binary) if config.binary else find_tool(monitor.program)
    if binary is None:
        raise DriverUnavailable(f"{monitor.program} is not installed", fix=monitor.install)
    other = f"set {monitor.setting} to the path of another program, or remove the setting"
    fix = other if config.binary else monitor.install
    printed = await _version(binary, fix)
    found = re.search(rf"^{monitor.program} v((\d+(?:\.\d+)*)\S*)", printed, re.IGNORECASE | re.MULTILINE)
    if found is None:
        shown = printed.partition("\n")[0][:MAX_SHOWN]
        raise DriverUnavailable(f"{binary} is not {monitor.info.title}: its version is {shown!r}", fix=fix)
    version, release = f"{monitor.info.title} {found[1]}", tuple(map(int, found[2].split(".")))
    if release < monitor.oldest:
        oldest = ".".join(map(str, monitor.oldest))
        raise DriverUnavailable(f"{binary} is {version}, which is too old: {oldest} is the oldest that works", fix=fix)
    if (defect := monitor.defective.get(release)) is not None:
        raise DriverUnavailable(f"{binary} is {version}, which {defect}", fix=fix)
    return Engine(binary, version, release)


async def _version(binary: str, fix: str) -> str:
    try:
        with trusted(Path(binary)) as program:
            path = f"/proc/self/fd/{program}"
            printed, trouble = await _run([path, "--version"], program)
    except FileNotFoundError as error:
        raise DriverUnavailable(f"there is no file {binary}", fix=fix) from error
    except Untrusted as error:  # which says what to do
        raise DriverUnavailable(str(error)) from error
    except OSError as error:
        raise DriverUnavailable(f"{binary} cannot be read: {error.strerror}", fix=fix) from error
    if trouble is None:
        return printed
    if (namespaces := (await _run(["true"]))[1]) is not None:
        raise DriverUnavailable(f"processes cannot be confined on this host: {namespaces}", fix=namespace_advice())
    if trouble.startswith(NOT_EXECUTABLE):  # our own user may be allowed to, but machines have others
        fix = f"chmod 755 {binary}, or {fix}"
    raise DriverUnavailable(f"{binary} does not run: {trouble.replace(path, binary)}", fix=fix)


async def _run(argv: Sequence[str], *files: int) -> tuple[str, str | None]:
    """Run a program that ends by itself, confined like a machine. Return what it printed, and what went wrong."""
    try:
        with anyio.fail_after(START_S):
            confined = in_machine(argv, {})
            async with spawn(confined, confinement=kvm_confinement(offline=False), pass_fds=files) as process:
                end = await process.wait()
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
        return "", str(error) or f"it did not end in {START_S:.0f} s"
    return end.detail, None if end.code == 0 else last_line(str(end))


def in_machine(
    argv: Sequence[str], files: Mapping[str, int], *, vcpus: int = 1, folder: str | None = None, folder_mb: int = 0
) -> list[str]:
    """Return `argv` in new namespaces, without any capability, where `files` have fixed names.

    If there is a `folder`, it can write `folder_mb` to it.
    """
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    return in_namespaces(
        [*powerless, *argv],
        programs=True,
        devices=[str(KVM_DEVICE)],
        folders=[folder] if folder else [],
        files=files,
        limits=rlimit_argv(processes=vcpus + THREADS),
        root_mb=ROOT_MB + (folder_mb if folder else 0),
    )
