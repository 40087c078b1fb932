"""Which driver runs the machines, and why: as the settings say, or the best one that really works here.

`decide` is pure: it looks at what is known and either chooses or says what has to be found out first. `choose` finds
it out. So nothing is probed that does not matter: where KVM does not work and gVisor does, nobody asks QEMU.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.errors import TooWeak
from templates.errors import BuildFailed
from vmm import probe
from vmm.errors import VmmError
from vmm.types import Accel, Isolation, Probe
from vmm.verdicts import Verdict

ISOLATION = {"qemu": Isolation.VM, "gvisor": Isolation.KERNEL, "bubblewrap": Isolation.NAMESPACE}
# What `auto` tries, best first. Bubblewrap is in neither: people have to ask for it.
WITH_KVM = ("qemu",)  # Firecracker and Cloud Hypervisor come before it once there are such drivers
WITHOUT_KVM = ("gvisor", "qemu")

Ask = Callable[[str], Awaitable[Probe]]


@dataclass(frozen=True, slots=True)
class Question:
    """Something to find out before a driver can be chosen."""

    driver: str | None  # does it work here? None: does KVM?


@dataclass(frozen=True, slots=True)
class Choice:
    """The driver to use, and what it says about this host. It may say that it cannot be used: then none can."""

    driver: str
    reasons: tuple[str, ...]  # what led here, first things first
    verdict: Probe
    better: str | None = None  # what would make a better choice possible

    @property
    def isolation(self) -> Isolation:
        return ISOLATION[self.driver]

    @property
    def because(self) -> str:
        """The reasons in one line."""
        end = (
            f"so {self.driver}" if self.verdict.usable else f"so nothing works, {self.driver} would be the first choice"
        )
        return "; ".join((*self.reasons, end))


async def choose(settings: Settings, ask: Ask) -> Choice:
    """Find out what is needed and choose; `ask` gets a driver's verdict.

    Raises:
        TooWeak: the driver that was asked for by name isolates less than the settings demand.
        VmmError, BuildFailed, OSError: the driver that was asked for by name cannot even be asked.
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
            probes[step.driver] = await ask(step.driver)
        except (VmmError, BuildFailed, OSError) as error:
            if settings.driver != AUTO:
                raise
            fix = f"read {error.log_path}" if isinstance(error, BuildFailed) else None
            probes[step.driver] = Probe(usable=False, reason=str(error), fix=fix)


def decide(settings: Settings, kvm: Verdict | None, probes: Mapping[str, Probe]) -> Choice | Question:
    """Choose a driver from what is known so far, or say what to find out next.

    Raises:
        TooWeak: as in `choose`.
    """
    if settings.driver == AUTO:
        return _decide_alone(settings, kvm, probes)
    name = settings.driver
    if name in ISOLATION and not ISOLATION[name].at_least(settings.min_isolation):
        raise TooWeak(name, ISOLATION[name], settings.min_isolation)
    return Choice(name, (f"driver = {name}",), probes[name]) if name in probes else Question(name)


def _decide_alone(settings: Settings, kvm: Verdict | None, probes: Mapping[str, Probe]) -> Choice | Question:
    least, reasons = settings.min_isolation, []
    if least is not Isolation.NAMESPACE:
        reasons.append(f"min_isolation = {least}")
    if settings.accel != AUTO:  # only virtual machines have one
        least = Isolation.VM
        reasons.append(f"accel = {settings.accel}")
    # Each with: does it count only if it runs under KVM?
    tries = [(name, False) for name in WITHOUT_KVM if ISOLATION[name].at_least(least)]
    if len({*WITH_KVM, *(name for name, _ in tries)}) > 1:  # else there is one left, whatever KVM does
        if kvm is None:
            return Question(None)
        reasons.append(f"KVM: {kvm.reason}")
        if kvm.usable is not False:  # None: only a whole machine can tell
            tries = [*((name, True) for name in WITH_KVM), *tries]
    better = None if kvm is None or kvm.usable else kvm.fix
    for name, only_with_kvm in tries:
        if name not in probes:
            return Question(name)
        verdict = probes[name]
        if verdict.usable and (verdict.accel is Accel.KVM or not only_with_kvm):
            return Choice(name, tuple(dict.fromkeys(reasons)), verdict, better)
        reasons.append(f"{name}: {verdict.reason}")
    first = tries[0][0]
    return Choice(first, tuple(dict.fromkeys(reasons)), probes[first], better)
