"""Probes of the host: the tiny guest under KVM, and how long results are cached."""

import json
import os
import time
from pathlib import Path

import anyio
import pytest

from vmm import probe, tiny_guest, verdicts
from vmm.hierarchy import Hierarchy
from vmm.process import Confinement, spawn
from vmm.verdicts import Verdict, Verdicts


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev/kvm that opens. Each test decides what the tiny guest prints."""
    file = tmp_path / "kvm"
    file.touch()
    monkeypatch.setattr(probe, "KVM_DEVICE", file)
    monkeypatch.setattr(probe, "TINY_GUEST_CPUS", (os.uname().machine,))
    return file


def replace_guest(monkeypatch, script: str) -> None:
    """Run other code in place of the tiny guest."""
    monkeypatch.setattr(tiny_guest, "__file__", "-c")
    monkeypatch.setattr(probe, "spawn", lambda argv, confinement: spawn([*argv, script], confinement=confinement))


async def kvm(cache_dir: Path) -> Verdict:
    with anyio.fail_after(30):
        return await probe.kvm(cache_dir)


async def test_a_host_without_the_device_is_not_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "KVM_DEVICE", tmp_path / "none")
    verdict = await kvm(tmp_path)
    assert (verdict.usable, verdict.reason) == (False, "this host has no /dev/kvm")
    assert list(tmp_path.iterdir()) == []


async def test_kvm_is_usable_if_the_tiny_guest_answers(device, tmp_path, monkeypatch):
    replace_guest(monkeypatch, f"print({tiny_guest.OK!r}, end='')")
    assert await kvm(tmp_path) == Verdict(True, "a tiny guest ran under KVM")


async def test_a_failure_has_a_reason_and_is_cached(device, tmp_path, monkeypatch):
    replace_guest(monkeypatch, "print('it is paravirtual', end='')")
    verdict = await kvm(tmp_path)
    assert (verdict.usable, verdict.reason) == (False, "/dev/kvm opens, but it is paravirtual")
    assert str(Verdicts(tmp_path).file(probe.TINY_GUEST)) in str(verdict.fix)
    replace_guest(monkeypatch, f"print({tiny_guest.OK!r}, end='')")
    assert await kvm(tmp_path) == verdict


async def test_kvm_is_not_usable_if_the_tiny_guest_crashes(device, tmp_path, monkeypatch):
    replace_guest(monkeypatch, "raise MemoryError('kernel bug')")
    verdict = await kvm(tmp_path)
    assert verdict.usable is False
    assert "MemoryError: kernel bug" in verdict.reason


async def test_a_tiny_guest_that_never_ends_is_killed_and_the_verdict_is_doubtful(device, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TINY_GUEST_S", 0.5)
    replace_guest(monkeypatch, "import threading; threading.Event().wait()")
    verdict = await kvm(tmp_path)
    assert (verdict.usable, verdict.doubtful) == (False, True)


async def test_a_custom_kernel_and_another_cpu_are_not_probed(device, tmp_path, monkeypatch):
    assert (await probe.kvm(tmp_path, own_kernel=True)).usable is None
    monkeypatch.setattr(probe, "TINY_GUEST_CPUS", ("vax",))
    verdict = await kvm(tmp_path)
    assert verdict.usable is None
    assert "not tried" in verdict.reason


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="/dev/kvm cannot be opened")
async def test_the_real_tiny_guest_gives_a_verdict_on_this_host(tmp_path):
    verdict = await kvm(tmp_path)
    assert verdict.usable is not None
    assert verdict.reason in {
        "a tiny guest ran under KVM",
        "/dev/kvm opens, but this KVM is paravirtual and cannot run ordinary guests",
    }


# -- verdicts ----------------------------------------------------------------------------------------------


def test_a_verdict_is_valid_only_for_its_question_and_details(tmp_path):
    kept, verdict = Verdicts(tmp_path / "cache"), Verdict(True, "it works")
    assert kept.get("q", qemu="7") is None
    kept.keep("q", verdict, qemu="7")
    assert kept.get("q", qemu="7") == verdict
    assert kept.get("q", qemu="8") is None
    assert kept.get("other", qemu="7") is None


@pytest.mark.parametrize("what", ["boot", "kernel", "user"])
def test_a_verdict_is_stale_after_a_reboot_or_for_another_kernel_or_user(tmp_path, what):
    kept = Verdicts(tmp_path)
    kept.keep("q", Verdict(True, "it works"))
    known = json.loads(kept.file("q").read_text())
    known["circumstances"][what] = "another"
    kept.file("q").write_text(json.dumps(known))
    assert kept.get("q") is None


def test_a_doubtful_verdict_is_stale_after_an_hour(tmp_path, monkeypatch):
    kept = Verdicts(tmp_path)
    kept.keep("slow", Verdict(False, "took too long", doubtful=True))
    kept.keep("sure", Verdict(False, "no such thing"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + verdicts.DOUBT_S / 2)
    assert kept.get("slow")
    monkeypatch.setattr(time, "time", lambda: now + verdicts.DOUBT_S + 1)
    assert kept.get("slow") is None
    assert kept.get("sure")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": {"odd": 1}}', '{"verdict": 7, "at": "x"}'])
def test_a_damaged_file_is_ignored(tmp_path, text):
    kept = Verdicts(tmp_path)
    kept.file("q").write_text(text)
    assert kept.get("q") is None


def test_a_verdict_that_cannot_be_cached_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    kept = Verdicts(tmp_path / "file")
    kept.keep("q", Verdict(True, "it works"))
    assert kept.get("q") is None


# -- confinement -------------------------------------------------------------------------------------------


def test_only_root_can_give_every_machine_its_own_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert probe.own_user() in probe.UIDS
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe.own_user() is None
    assert any("all machines run as this user" in text for text in probe.missing_protections(Hierarchy(2)))


def test_a_host_without_cgroups_misses_a_protection_with_its_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    [missing] = probe.missing_protections(Hierarchy(None, reason="they are not mounted"))
    assert missing.endswith("as a whole: they are not mounted")
    assert probe.missing_protections(Hierarchy(2)) == ()


async def test_the_tool_that_is_missing_for_confinement_is_named(monkeypatch):
    plain = Confinement(offline=False)
    assert await probe.confinement_trouble(plain) is None
    monkeypatch.setattr(Confinement, "wrap", lambda self, argv: ["no-such-tool", *argv])
    trouble = await probe.confinement_trouble(plain)
    assert trouble is not None
    assert "no-such-tool" in trouble.reason


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=9999"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_the_sysctl_that_forbids_namespaces_is_named(tmp_path, name, value, setting):
    for sysctl in probe.SYSCTLS:
        (tmp_path / sysctl).parent.mkdir(exist_ok=True)
        (tmp_path / sysctl).write_text(probe.SYSCTLS[sysctl][1] + "\n")
    assert "sysctl" not in probe.namespace_advice(tmp_path)
    (tmp_path / name).write_text(f"{value}\n")
    assert probe.namespace_advice(tmp_path).endswith(f"sysctl -w {setting}")


async def test_a_program_that_does_not_end_has_no_version(monkeypatch):
    monkeypatch.setattr(probe, "VERSION_S", 0.05)
    assert await probe.version_output("sleep", "1000") == ""
    assert await probe.version_output("no-such-program-here") == ""


async def test_a_program_that_fails_has_no_version_whatever_it_prints():
    assert await probe.version_output("sh", "-c", "echo version 1") == "version 1"
    assert await probe.version_output("sh", "-c", "echo version 1; exit 3") == ""


async def test_of_a_program_that_prints_much_only_the_first_lines_are_kept():
    assert len((await probe.version_output("seq", "100000")).splitlines()) == probe.VERSION_LINES
