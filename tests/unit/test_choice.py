"""Which driver is chosen, what is probed for that, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import TooWeak
from mcp_sandbox.machines.choice import Choice, Question, choose, decide
from vmm.errors import DriverUnavailable
from vmm.types import Accel, Isolation, Probe
from vmm.verdicts import Verdict

KVM, UNTRIED = Verdict(True, "it runs"), Verdict(None, "not tried")
NO_KVM = Verdict(False, "there is none", "use another host")
UNDER_KVM = Probe(True, "a guest booted", accel=Accel.KVM)
EMULATED = Probe(True, "emulation", accel=Accel.TCG)
WORKS = Probe(True, "a program ran")
BROKEN = Probe(False, "not installed", "install it")
PROBE_KVM, PROBE_QEMU, PROBE_GVISOR = Question(None), Question("qemu"), Question("gvisor")
PROBE_FIRECRACKER = Question("firecracker")
NO_MICROVMS = {"firecracker": BROKEN, "cloud-hypervisor": BROKEN}

TABLE: list[tuple[dict[str, Any], Verdict | None, dict[str, Probe], Question | str]] = [
    # With working KVM a virtual machine is chosen, if it really runs under KVM.
    ({}, None, {}, PROBE_KVM),
    ({}, KVM, {}, PROBE_FIRECRACKER),
    ({}, KVM, {"firecracker": UNDER_KVM}, "firecracker"),
    ({}, KVM, {"firecracker": BROKEN}, Question("cloud-hypervisor")),
    ({}, KVM, {"firecracker": BROKEN, "cloud-hypervisor": UNDER_KVM}, "cloud-hypervisor"),
    ({}, KVM, {**NO_MICROVMS}, PROBE_QEMU),
    ({}, KVM, {**NO_MICROVMS, "qemu": UNDER_KVM}, "qemu"),
    ({}, KVM, {**NO_MICROVMS, "qemu": BROKEN}, PROBE_GVISOR),
    ({}, KVM, {**NO_MICROVMS, "qemu": BROKEN, "gvisor": WORKS}, "gvisor"),
    ({}, KVM, {**NO_MICROVMS, "qemu": EMULATED}, PROBE_GVISOR),
    ({}, KVM, {**NO_MICROVMS, "qemu": EMULATED, "gvisor": BROKEN}, "qemu"),
    # Without KVM, QEMU is not probed while gVisor works.
    ({}, NO_KVM, {}, PROBE_GVISOR),
    ({}, NO_KVM, {"gvisor": WORKS}, "gvisor"),
    ({}, NO_KVM, {"gvisor": BROKEN}, PROBE_QEMU),
    ({}, NO_KVM, {"gvisor": BROKEN, "qemu": EMULATED}, "qemu"),
    ({}, NO_KVM, {"gvisor": BROKEN, "qemu": BROKEN}, "gvisor"),
    # Only a driver that boots it can tell whether KVM runs a custom guest kernel.
    ({"guest_kernel": Path("/vmlinuz")}, UNTRIED, {}, PROBE_FIRECRACKER),
    ({"guest_kernel": Path("/vmlinuz")}, UNTRIED, {"firecracker": UNDER_KVM}, "firecracker"),
    ({"guest_kernel": Path("/vmlinuz")}, UNTRIED, {**NO_MICROVMS}, PROBE_QEMU),
    ({"guest_kernel": Path("/vmlinuz")}, UNTRIED, {**NO_MICROVMS, "qemu": EMULATED}, PROBE_GVISOR),
    # If only virtual machines are allowed, QEMU is the only one without KVM.
    ({"min_isolation": "vm"}, None, {}, PROBE_KVM),
    ({"min_isolation": "vm"}, NO_KVM, {}, PROBE_QEMU),
    ({"min_isolation": "vm"}, NO_KVM, {"qemu": EMULATED}, "qemu"),
    ({"min_isolation": "kernel"}, NO_KVM, {"gvisor": WORKS}, "gvisor"),
    ({"accel": "tcg"}, NO_KVM, {"qemu": EMULATED}, "qemu"),
    ({"accel": "tcg"}, KVM, {**NO_MICROVMS, "qemu": EMULATED}, "qemu"),
    ({"accel": "kvm"}, NO_KVM, {"qemu": BROKEN}, "qemu"),
    # A driver that the settings name is never replaced, and no other one is probed.
    ({"driver": "bubblewrap"}, None, {}, Question("bubblewrap")),
    ({"driver": "bubblewrap"}, None, {"bubblewrap": WORKS}, "bubblewrap"),
    ({"driver": "gvisor"}, None, {"gvisor": BROKEN}, "gvisor"),
    ({"driver": "gvisor", "min_isolation": "kernel"}, None, {"gvisor": WORKS}, "gvisor"),
]


@pytest.mark.parametrize(("settings", "kvm", "probes", "expected"), TABLE)
def test_decide(settings: dict[str, Any], kvm: Verdict | None, probes: dict[str, Probe], expected: Question | str):
    step = decide(Settings(**settings), kvm, probes)
    assert (step.driver if isinstance(step, Choice) else step) == expected


def test_auto_never_chooses_bubblewrap():
    last = decide(Settings(), NO_KVM, {"gvisor": BROKEN, "qemu": BROKEN, "bubblewrap": WORKS})
    assert isinstance(last, Choice)
    assert (last.driver, last.verdict.usable) == ("gvisor", False)


def test_a_choice_has_its_reasons_and_what_would_allow_a_better_one():
    choice = decide(Settings(), NO_KVM, {"gvisor": BROKEN, "qemu": EMULATED})
    assert isinstance(choice, Choice)
    assert choice.reasons == ("KVM: there is none", "gvisor: not installed")
    assert choice.better == "install it", "before that of KVM, which may take another host"


def test_without_kvm_the_best_driver_that_needs_none_can_be_improved_only_by_kvm():
    choice = decide(Settings(), NO_KVM, {"gvisor": WORKS})
    assert isinstance(choice, Choice)
    assert choice.better == "use another host"


@pytest.mark.parametrize(
    ("driver", "least"), [("gvisor", "vm"), ("bubblewrap", "vm"), ("bubblewrap", "kernel")], ids=str
)
def test_a_named_driver_that_is_too_weak_is_refused_without_a_probe(driver: str, least: str):
    with pytest.raises(TooWeak, match=re.escape(f"min_isolation = {least}")) as refusal:
        decide(Settings(driver=driver, min_isolation=Isolation(least)), None, {})
    assert refusal.value.driver == driver


@pytest.fixture
def _no_kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object, **__: object) -> Verdict:
        return NO_KVM

    monkeypatch.setattr("vmm.probe.kvm", answer)


class Host:
    """Drivers with fixed probes, and a record of which were probed."""

    def __init__(self, **answers: Probe | Exception) -> None:
        self.answers = answers
        self.probed: list[str] = []

    async def probe(self, name: str) -> Probe:
        self.probed.append(name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.usefixtures("_no_kvm")
async def test_nothing_is_probed_that_does_not_matter():
    host = Host(gvisor=WORKS)
    assert (await choose(Settings(), host.probe)).driver == "gvisor"
    assert host.probed == ["gvisor"]


@pytest.mark.usefixtures("_no_kvm")
async def test_auto_skips_a_driver_that_cannot_be_probed():
    host = Host(gvisor=DriverUnavailable("broken"), qemu=EMULATED)
    choice = await choose(Settings(), host.probe)
    assert (choice.driver, host.probed) == ("qemu", ["gvisor", "qemu"])
    assert "gvisor: broken" in choice.reasons


async def test_a_named_driver_that_cannot_be_probed_is_an_error():
    host = Host(gvisor=DriverUnavailable("broken", fix="none"))
    with pytest.raises(DriverUnavailable, match="broken"):
        await choose(Settings(driver="gvisor"), host.probe)
