"""Choose the driver: the one that the settings name, or the best one that works on this host.

`decide` is pure. From what is known it makes the choice, or names the next thing to probe; `choose` does the probing.
So a host without KVM never probes QEMU while gVisor works.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.errors import TooWeak
from templates.errors import BuildFailed
from vmm import probe
from vmm.driver import DRIVERS, driver_info, driver_infos
from vmm.errors import VmmError
from vmm.types import Accel, Isolation, Probe
from vmm.verdicts import Verdict

ProbeDriver = Callable[[str], Awaitable[Probe]]


@dataclass(frozen=True, slots=True)
class Question:
    """What to probe before a driver can be chosen."""

    driver: str | None  # None: KVM


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen driver and its probe. If that driver is not usable, none is."""

    driver: str
    reasons: tuple[str, ...]  # in the order in which they were found
    verdict: Probe
    better: str | None = None  # a step that would allow a better choice


async def choose(settings: Settings, probe_driver: ProbeDriver) -> Choice:
    """Return the choice, probing drivers as needed.

    Raises:
        TooWeak: the driver named in the settings isolates less than they demand.
        VmmError, BuildFailed, OSError: the driver named in the settings cannot be probed.
    """
    kvm: Verdict | None = None
    probes: dict[str, Probe] = {}
    while True:
        step = decide(settings, kvm, probes)
        if isinstance(step, Choice):
            return step
        if step.driver is None:
            kvm = await probe.kvm(settings.cache_dir, own_kernel=settings.guest_kernel is not None)
            continue
        try:
            probes[step.driver] = await probe_driver(step.driver)
        except (VmmError, BuildFailed, OSError) as error:
            if settings.driver != AUTO:
                raise
            fix = f"read {error.log_path}" if isinstance(error, BuildFailed) else None
            probes[step.driver] = Probe(usable=False, reason=str(error), fix=fix)


def decide(settings: Settings, kvm: Verdict | None, probes: Mapping[str, Probe]) -> Choice | Question:
    """Choose a driver from what is known so far, or return what to probe next.

    Raises:
        TooWeak: as in `choose`.
    """
    if settings.driver == AUTO:
        return _decide_auto(settings, kvm, probes)
    name = settings.driver
    if name in DRIVERS:  # loading reports an unknown name
        isolation = driver_info(name).capabilities.isolation
        if not isolation.at_least(settings.min_isolation):
            raise TooWeak(name, isolation, settings.min_isolation)
    return Choice(name, (f"driver = {name}",), probes[name]) if name in probes else Question(name)


def _decide_auto(settings: Settings, kvm: Verdict | None, probes: Mapping[str, Probe]) -> Choice | Question:
    least, reasons = settings.min_isolation, []
    if least is not Isolation.NAMESPACE:
        reasons.append(f"min_isolation = {least}")
    if settings.accel != AUTO:  # only virtual machines have an accelerator
        least = Isolation.VM
        reasons.append(f"accel = {settings.accel}")
    strong = [info for info in driver_infos() if info.capabilities.isolation.at_least(least)]
    with_kvm = _ranked({info.name: info.rank_with_kvm for info in strong})
    tries = [(name, False) for name in _ranked({info.name: info.rank_without_kvm for info in strong})]
    if len({*with_kvm, *(name for name, _ in tries)}) > 1:  # a single candidate is chosen with or without KVM
        if kvm is None:
            return Question(None)
        reasons.append(f"KVM: {kvm.reason}")
        if kvm.usable is not False:  # None: only booting a machine can tell
            tries = [*((name, True) for name in with_kvm), *tries]
    fixes: list[str | None] = []  # of better drivers that do not work
    for name, needs_kvm in tries:
        if name not in probes:
            return Question(name)
        verdict = probes[name]
        if verdict.usable and (verdict.accel is Accel.KVM or not needs_kvm):
            break
        reasons.append(f"{name}: {verdict.reason}")
        fixes.append(None if verdict.usable else verdict.fix)
    else:
        name = tries[0][0]
    fixes.append(None if kvm is None or kvm.usable else kvm.fix)  # last: it may take another host
    return Choice(name, tuple(dict.fromkeys(reasons)), probes[name], next(filter(None, fixes), None))


def _ranked(ranks: Mapping[str, int | None]) -> list[str]:
    """Return the names of the drivers that have a rank, lowest first."""
    ranked = [(rank, name) for name, rank in ranks.items() if rank is not None]
    return [name for _, name in sorted(ranked)]
