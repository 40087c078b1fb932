"""Which driver `auto` takes, what it asks for that, and what is refused."""

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

KVM, NO_KVM, UNTRIED = Verdict(True, "it runs"), Verdict(False, "there is none", "buy one"), Verdict(None, "not tried")
UNDER_KVM = Probe(True, "a guest booted", accel=Accel.KVM)
EMULATED = Probe(True, "emulation", accel=Accel.TCG)
WORKS = Probe(True, "a program ran")
BROKEN = Probe(False, "not installed", "install it")
ASK_KVM, ASK_QEMU, ASK_GVISOR = Question(None), Question("qemu"), Question("gvisor")

TABLE: list[tuple[dict[str, Any], Verdict | None, dict[str, Probe], Question | str]] = [
    # With working KVM it is a virtual machine, if that really runs under KVM.
    ({}, None, {}, ASK_KVM),
    ({}, KVM, {}, ASK_QEMU),
    ({}, KVM, {"qemu": UNDER_KVM}, "qemu"),
    ({}, KVM, {"qemu": BROKEN}, ASK_GVISOR),
    ({}, KVM, {"qemu": BROKEN, "gvisor": WORKS}, "gvisor"),
    ({}, KVM, {"qemu": EMULATED}, ASK_GVISOR),
    ({}, KVM, {"qemu": EMULATED, "gvisor": BROKEN}, "qemu"),
    # Without it, QEMU is not even asked as long as gVisor works.
    ({}, NO_KVM, {}, ASK_GVISOR),
    ({}, NO_KVM, {"gvisor": WORKS}, "gvisor"),
    ({}, NO_KVM, {"gvisor": BROKEN}, ASK_QEMU),
    ({}, NO_KVM, {"gvisor": BROKEN, "qemu": EMULATED}, "qemu"),
    ({}, NO_KVM, {"gvisor": BROKEN, "qemu": BROKEN}, "gvisor"),
    # Whether KVM runs a kernel that somebody made for it, only QEMU can tell.
    ({"guest_kernel": Path("vmlinuz")}, UNTRIED, {}, ASK_QEMU),
    ({"guest_kernel": Path("vmlinuz")}, UNTRIED, {"qemu": EMULATED}, ASK_GVISOR),
    # Where only virtual machines will do, KVM makes them faster, but changes no choice.
    ({"min_isolation": "vm"}, None, {}, ASK_QEMU),
    ({"min_isolation": "vm"}, None, {"qemu": EMULATED}, "qemu"),
    ({"min_isolation": "kernel"}, NO_KVM, {"gvisor": WORKS}, "gvisor"),
    ({"accel": "tcg"}, None, {"qemu": EMULATED}, "qemu"),
    ({"accel": "kvm"}, None, {"qemu": BROKEN}, "qemu"),
    # A driver that was named is never replaced, and nothing else is asked.
    ({"driver": "bubblewrap"}, None, {}, Question("bubblewrap")),
    ({"driver": "bubblewrap"}, None, {"bubblewrap": WORKS}, "bubblewrap"),
    ({"driver": "gvisor"}, None, {"gvisor": BROKEN}, "gvisor"),
    ({"driver": "gvisor", "min_isolation": "kernel"}, None, {"gvisor": WORKS}, "gvisor"),
]


@pytest.mark.parametrize(("settings", "kvm", "probes", "expected"), TABLE)
def test_the_table(settings: dict[str, Any], kvm: Verdict | None, probes: dict[str, Probe], expected: Question | str):
    step = decide(Settings(**settings), kvm, probes)
    assert (step.driver if isinstance(step, Choice) else step) == expected


def test_bubblewrap_is_never_chosen_by_itself():
    last = decide(Settings(), NO_KVM, {"gvisor": BROKEN, "qemu": BROKEN, "bubblewrap": WORKS})
    assert isinstance(last, Choice)
    assert (last.driver, last.verdict.usable) == ("gvisor", False)


def test_a_choice_comes_with_the_whole_chain_of_reasons_and_what_would_make_it_better():
    choice = decide(Settings(), NO_KVM, {"gvisor": BROKEN, "qemu": EMULATED})
    assert isinstance(choice, Choice)
    assert choice.reasons == ("KVM: there is none", "gvisor: not installed")
    assert choice.better == "buy one"


@pytest.mark.parametrize(
    ("driver", "least"), [("gvisor", "vm"), ("bubblewrap", "vm"), ("bubblewrap", "kernel")], ids=str
)
def test_a_named_driver_that_is_too_weak_is_refused_before_it_is_asked(driver: str, least: str):
    with pytest.raises(TooWeak, match=re.escape(f"min_isolation = {least}")) as refusal:
        decide(Settings(driver=driver, min_isolation=Isolation(least)), None, {})
    assert refusal.value.driver == driver


@pytest.fixture
def _no_kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object, **__: object) -> Verdict:
        return NO_KVM

    monkeypatch.setattr("vmm.probe.kvm", answer)


class Host:
    """Drivers that say what they were told to, and who was asked."""

    def __init__(self, **answers: Probe | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def ask(self, name: str) -> Probe:
        self.asked.append(name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.usefixtures("_no_kvm")
async def test_nothing_is_asked_that_does_not_matter():
    host = Host(gvisor=WORKS)
    assert (await choose(Settings(), host.ask)).driver == "gvisor"
    assert host.asked == ["gvisor"]


@pytest.mark.usefixtures("_no_kvm")
async def test_a_driver_that_cannot_even_be_asked_gives_way_to_the_next():
    host = Host(gvisor=DriverUnavailable("no cure"), qemu=EMULATED)
    choice = await choose(Settings(), host.ask)
    assert (choice.driver, host.asked) == ("qemu", ["gvisor", "qemu"])
    assert "gvisor: no cure" in choice.reasons


async def test_a_named_driver_that_cannot_be_asked_is_an_error():
    host = Host(gvisor=DriverUnavailable("no cure", fix="none"))
    with pytest.raises(DriverUnavailable, match="no cure"):
        await choose(Settings(driver="gvisor"), host.ask)
