"""Whether QEMU can run machines on this host, and with which accelerator, found by running them."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio

from vmm import probe as host
from vmm.driver import DriverConfig
from vmm.drivers.qemu import command
from vmm.limits import Hierarchy
from vmm.probe import (
    confinement_trouble,
    kvm_confinement,
    missing_protections,
    missing_with_kvm,
    own_user,
    version_output,
)
from vmm.process import Confinement, spawn
from vmm.trust import trusted
from vmm.types import GUEST_KERNEL, Accel, Exit, GuestKernel, Probe
from vmm.verdicts import Verdict, Verdicts

START_S = 15.0  # it takes 60 ms
WHOLE_GUEST = "whole-guest"  # the question
INSTALL = "apt-get install qemu-system-x86"


@dataclass(frozen=True, slots=True)
class Engine:
    """A QEMU of this host, and how to start it."""

    binary: str
    version: str
    namespaces: bool  # it runs in namespaces of its own; otherwise it shares the host's files and processes

    def command(self, argv: list[str], accel: Accel) -> list[str]:
        """Return the command to start instead of `argv`."""
        return command.in_machine(argv, accel) if self.namespaces else argv

    def confinement(self, accel: Accel) -> Confinement:
        """Return how to confine a process. With KVM it must be able to open the device, perhaps by its group."""
        offline = not self.namespaces  # they include an empty network
        if accel is not Accel.KVM:
            return Confinement(own_user(), offline=offline)
        return kvm_confinement(offline=offline)


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Return whether QEMU can run machines on this host, with which accelerator, and how to start it."""
    binary = command.find_binary()
    if binary is None:  # a guest kernel is of no use yet
        return Probe(usable=False, reason=f"{command.SYSTEM} is not installed", fix=INSTALL), None
    trouble = await _namespace_trouble(binary)
    engine = Engine(binary, await _version(binary), namespaces=trouble is None)
    verdict = await _probe(config, hierarchy, engine)
    if verdict.usable and trouble is not None:
        missing = f"QEMU shares the host's files and processes, because it does not start in namespaces: {trouble}"
        verdict = replace(verdict, missing_protections=(*verdict.missing_protections, missing))
    return verdict if config.kernel else replace(verdict, lacks=GUEST_KERNEL), engine


async def _namespace_trouble(binary: str) -> str | None:
    """Start QEMU in namespaces of its own and let it print its version; return None, or what went wrong."""
    argv = command.in_machine([binary, "--version"], Accel.TCG)
    try:
        with anyio.fail_after(START_S):
            async with spawn(argv, confinement=Confinement(own_user(), offline=False)) as process:
                end = await process.wait()
                return None if end.code == 0 else host.last_line(str(end))
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
        return str(error) or f"no answer in {START_S:.0f} s"


async def _probe(config: DriverConfig, hierarchy: Hierarchy, engine: Engine) -> Probe:
    version = engine.version
    missing = missing_protections(hierarchy)
    kvm = Verdict(False, "accel = tcg") if config.accel is Accel.TCG else await kvm_boots(config, engine)
    if kvm.usable:
        return Probe(True, kvm.reason, None, Accel.KVM, version, (*missing, *missing_with_kvm()))
    if config.accel is Accel.KVM:
        return Probe(False, kvm.reason, kvm.fix, None, version, missing)
    trouble = await _start_trouble(engine)
    if trouble is not None:
        return Probe(False, trouble.reason, trouble.fix, None, version)
    return Probe(True, f"emulation (TCG): {kvm.reason}", kvm.fix, Accel.TCG, version, missing)


async def _start_trouble(engine: Engine) -> Verdict | None:
    """Start an emulated machine that never runs, and quit it over its monitor; return None, or what went wrong."""
    answers, confinement = b"", engine.confinement(Accel.TCG)
    try:
        with anyio.fail_after(START_S):
            argv = engine.command(command.standing_argv(engine.binary), Accel.TCG)
            async with spawn(argv, confinement=confinement, stdio=True) as process:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):  # it has quit, or ended before
                    await process.stream.send(b'{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n')
                    while True:
                        answers += await process.stream.receive()
                end = await process.wait()
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
        return Verdict(False, f"QEMU does not start: {error or f'no answer in {START_S:.0f} s'}", INSTALL)
    if end.code == 0 and b'"QMP"' in answers:
        return None
    # Perhaps no process starts with so few privileges.
    return await confinement_trouble(confinement) or Verdict(False, f"QEMU does not start: {end}", INSTALL)


async def kvm_boots(config: DriverConfig, engine: Engine) -> Verdict:
    """Return whether our kernel boots under KVM. This is tried only if a tiny guest runs, and the result is cached."""
    first = await host.kvm(config.cache_dir, own_kernel=config.own_kernel)
    if first.usable is False:
        return first
    if config.kernel is None:
        return host.NO_KERNEL
    files = [str(config.kernel.vmlinuz), str(config.kernel.initramfs)]
    verdicts = Verdicts(config.cache_dir)
    boot = partial(host.boots, partial(_boot, engine, config.kernel), verdicts.file(WHOLE_GUEST))
    return await verdicts.ask(WHOLE_GUEST, boot, qemu=engine.version, files=files)


async def _boot(engine: Engine, kernel: GuestKernel) -> Exit:
    """Boot a guest that prints a word and ends."""
    with trusted(kernel.vmlinuz) as vmlinuz, trusted(kernel.initramfs) as initramfs:
        argv = engine.command(command.probe_argv(engine.binary, Accel.KVM, vmlinuz, initramfs), Accel.KVM)
        confinement = engine.confinement(Accel.KVM)
        async with spawn(argv, confinement=confinement, pass_fds=(vmlinuz, initramfs)) as process:
            return await process.wait()


async def _version(binary: str) -> str:
    found = re.search(r"version (\S+)(?: \(([^)]*)\))?", await version_output(binary, "--version"))
    return f"QEMU {found[2] or found[1]}" if found else "QEMU of unknown version"
