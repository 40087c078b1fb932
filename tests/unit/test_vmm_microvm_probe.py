"""When a driver of microVMs says that it works, and what it says otherwise. Programs are shell scripts."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests.unit.microvms import FAKE, NAMES, FakeMonitors
from vmm import probe as host
from vmm.driver import DriverConfig, load_driver
from vmm.limits import detect
from vmm.microvm import api, probe
from vmm.microvm import driver as driver_module
from vmm.microvm.driver import MicroVmDriver
from vmm.microvm.probe import Engine
from vmm.types import GUEST_KERNEL, Accel, Exit, GuestKernel, Probe
from vmm.verdicts import Verdict

pytestmark = pytest.mark.parametrize("name", NAMES)

VERSIONS = {
    "firecracker": {
        "Firecracker v1.16.1\n": "",
        "Firecracker v1.10.0\n": "",
        "Firecracker v1.9.1\n": "is Firecracker 1.9.1, which is too old: 1.10 is the oldest that works",
        "Firecracker v1.14.1\n": "is Firecracker 1.14.1, which damages copies of machines with more than 3 GB",
        "Hello\n": "is not Firecracker: its version is 'Hello'",
        "cloud-hypervisor v53.0\n": "is not Firecracker: its version is 'cloud-hypervisor v53.0'",
    },
    "cloud-hypervisor": {
        "cloud-hypervisor v53.0.0\nMigration Protocol Versions: 0\n": "",
        "cloud-hypervisor v40.0\n": "",
        "cloud-hypervisor v39.0.0\n": "is Cloud Hypervisor 39.0.0, which is too old: 40 is the oldest that works",
        "": "is not Cloud Hypervisor: its version is ''",
    },
}
UNBUILT = {"firecracker": "Firecracker v1.16.1-dev\n", "cloud-hypervisor": "cloud-hypervisor v53.0-12-gabcdef\n"}
STARTING = {"firecracker": "/actions", "cloud-hypervisor": "/api/v1/vm.boot"}
SETTING = {"firecracker": "firecracker", "cloud-hypervisor": "cloud_hypervisor"}


def says(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    """Let the tiny guest have this result, and any user open a device, because this host may not have KVM's."""

    async def answer(*_: object, own_kernel: bool) -> Verdict:
        return verdict

    monkeypatch.setattr("vmm.probe.kvm", answer)
    for module in (host, probe):
        monkeypatch.setattr(module, "KVM_DEVICE", Path(os.devnull))


@pytest.fixture
def _kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, Verdict(True, "a tiny guest ran"))


def script(file: Path, text: str) -> Path:
    """Write a program."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def prints(text: str, file: Path) -> Path:
    """Write a program that prints `text`."""
    return script(file, f"printf '%s' '{text}'")


def good(name: str, file: Path) -> Path:
    """Write a program that prints a version that works."""
    return prints(next(iter(VERSIONS[name])), file)


async def verdict(name: str, folder: Path, binary: Path | None = None, accel: Accel | None = None) -> Probe:
    with anyio.fail_after(60):
        return await load_driver(name, DriverConfig(folder, folder, accel=accel, binary=binary)).probe()


@pytest.mark.usefixtures("_kvm")
async def test_the_version_is_asked_and_an_old_one_refused(name: str, tmp_path: Path):
    for number, (printed, reason) in enumerate(VERSIONS[name].items()):
        binary = prints(printed, tmp_path / str(number))
        found = await verdict(name, tmp_path, binary)
        assert found.usable is not bool(reason)
        assert found.reason == (f"{binary} {reason}" if reason else "a tiny guest ran")
        if found.usable:
            assert (found.program, found.accel, found.lacks) == (binary, Accel.KVM, GUEST_KERNEL)


@pytest.mark.usefixtures("_kvm")
async def test_builds_between_two_releases_have_versions_of_their_own(name: str, tmp_path: Path):
    found = await verdict(name, tmp_path, prints(UNBUILT[name], tmp_path / "program"))
    assert found.version is not None
    assert found.version.endswith(UNBUILT[name].strip().partition(" v")[2])


@pytest.mark.usefixtures("_kvm")
async def test_the_program_is_found_on_the_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    good(name, tmp_path / name)
    assert (await verdict(name, tmp_path)).usable


@pytest.mark.usefixtures("_kvm")
async def test_without_its_program_a_driver_says_where_to_get_it_and_how_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = await verdict(name, tmp_path)
    assert (found.usable, found.reason) == (False, f"{name} is not installed")
    assert found.fix is not None
    assert f"https://github.com/{'firecracker-microvm' if name == 'firecracker' else name}/" in found.fix
    assert "sha256sum" in found.fix
    assert f"/usr/local/bin/{name}" in found.fix


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no file"),
        ("echo broken >&2; exit 3", "does not run: status 3: broken"),
        ("sleep 1000", "does not run: it did not end in 1 s"),
        ("yes", "does not run: it did not end in 1 s"),
        ("/nothing/here", "does not run: status 127"),
    ],
)
@pytest.mark.usefixtures("_kvm")
async def test_a_program_that_a_setting_names_and_that_does_not_run_is_refused_with_the_reason(
    name: str, text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if "did not end" in reason:
        monkeypatch.setattr(probe, "START_S", 1.0)
    binary = tmp_path / "program"
    if text is not None:
        script(binary, text)
    found = await verdict(name, tmp_path, binary)
    assert not found.usable
    assert reason in found.reason
    assert str(binary) in found.reason
    assert found.fix == f"set {SETTING[name]} to the path of another program, or remove the setting"


@pytest.mark.usefixtures("_kvm")
async def test_a_program_that_machines_may_not_execute_can_be_repaired(name: str, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root gives machines another user")
    binary = good(name, tmp_path / "program")
    binary.chmod(0o700)
    found = await verdict(name, tmp_path, binary)
    assert not found.usable
    assert (found.fix or "").startswith(f"chmod 755 {binary}, or set {SETTING[name]}")


@pytest.mark.usefixtures("_kvm")
async def test_a_program_in_a_directory_that_is_closed_to_us_is_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def closed(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(probe, "trusted", closed)
    found = await verdict(name, tmp_path, tmp_path / "program")
    assert found.reason == f"{tmp_path}/program cannot be read: Permission denied"


@pytest.mark.usefixtures("_kvm")
async def test_a_program_that_other_users_can_change_is_not_run(name: str, tmp_path: Path):
    binary = script(tmp_path / "program", f"touch {tmp_path}/ran")
    binary.chmod(0o777)
    tmp_path.chmod(0o777)
    found = await verdict(name, tmp_path, binary)
    assert "can be changed by other users" in found.reason
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("_kvm")
async def test_a_host_that_forbids_namespaces_is_told_from_a_broken_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(probe, "in_machine", lambda *_, **__: ["sh", "-c", "echo 'unshare failed'; exit 1"])
    found = await verdict(name, tmp_path, good(name, tmp_path / "program"))
    assert found.reason == "processes cannot be confined on this host: status 1: unshare failed"
    assert found.fix == host.namespace_advice()


@pytest.mark.usefixtures("_kvm")
async def test_a_driver_that_does_not_work_is_tried_again_but_not_for_each_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = load_driver(name, DriverConfig(tmp_path, tmp_path, binary=tmp_path / "program"))
    assert not (await driver.probe()).usable
    good(name, tmp_path / "program")
    assert not (await driver.probe()).usable
    later = anyio.current_time() + driver_module.TRY_AGAIN_S
    monkeypatch.setattr(anyio, "current_time", lambda: later)
    assert (await driver.probe()).usable


@pytest.mark.usefixtures("_kvm")
async def test_a_host_that_must_emulate_does_not_get_it(name: str, tmp_path: Path):
    found = await verdict(name, tmp_path, good(name, tmp_path / "program"), Accel.TCG)
    assert not found.usable
    assert "needs KVM" in found.reason
    assert found.fix == "remove the setting accel, or set driver = qemu"


async def test_on_a_host_without_kvm_that_is_the_reason_and_no_program_is_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    says(monkeypatch, Verdict(False, "this KVM is paravirtual", "use another host"))
    binary = script(tmp_path / "program", f"touch {tmp_path}/ran")
    for given in (binary, None):
        found = await verdict(name, tmp_path, given)
        assert (found.usable, found.reason, found.fix) == (False, "this KVM is paravirtual", "use another host")
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("_kvm")
async def test_machines_that_run_as_root_because_of_the_device_are_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(probe, "missing_with_kvm", lambda: ("machines run as root",))
    found = await verdict(name, tmp_path, good(name, tmp_path / "program"))
    assert "machines run as root" in found.missing_protections


async def with_kernel(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, own: bool = True, /, **behaviour: object
) -> Probe:
    """Probe with a guest kernel, and a monitor that is a fake. Only booting can tell about one of the user's own."""
    says(monkeypatch, Verdict(None if own else True, "what the tiny guest says"))
    monitors = FakeMonitors(folder, monkeypatch)
    driver, kernel = monitors.driver(name, **behaviour), monitors.spec.boot
    assert isinstance(kernel, GuestKernel)

    async def found(*_: object) -> Engine:
        return Engine(str(FAKE), "a monitor 1.2", (1, 2))

    monkeypatch.setattr(probe, "find", found)
    config = replace(driver._config, kernel=kernel, own_kernel=own)
    with anyio.fail_after(60):
        return (await probe.probe(driver.monitor, config, detect(), driver._boot_alone))[0]


async def boots_now(name: str, folder: Path, engine: Engine, end: Exit, asked: list[Engine]) -> Verdict:
    """Ask whether a kernel boots that ends in this way when it is tried."""

    async def boot(engine: Engine, _kernel: GuestKernel) -> Exit:
        asked.append(engine)
        return end

    kernel = GuestKernel(folder / "vmlinux", folder / "initramfs")
    driver = load_driver(name, DriverConfig(folder, folder, kernel=kernel))
    assert isinstance(driver, MicroVmDriver)
    return await probe._boots(driver.monitor, driver._config, engine, boot)


async def test_another_program_of_the_same_version_is_tried_again(name: str, tmp_path: Path):
    asked: list[Engine] = []
    engine = Engine(str(good(name, tmp_path / "program")), "a monitor 1.2", (1, 2))
    for _ in range(2):
        assert not (await boots_now(name, tmp_path, engine, Exit(code=1), asked)).usable
    assert len(asked) == 1
    script(tmp_path / "program", "echo another build")
    assert (await boots_now(name, tmp_path, engine, Exit(0, detail=host.PROBE_WORD), asked)).usable


async def test_a_guest_that_the_host_killed_is_tried_again_later(name: str, tmp_path: Path):
    engine = Engine(str(good(name, tmp_path / "program")), "a monitor 1.2", (1, 2))
    assert (await boots_now(name, tmp_path, engine, Exit(signal=signal.SIGKILL), [])).doubtful


@pytest.mark.parametrize("own", [True, False])
async def test_the_kernel_is_booted_before_a_driver_says_that_it_works(
    name: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = await with_kernel(name, tmp_path, monkeypatch, own, boots=STARTING[name], word=host.PROBE_WORD)
    assert (found.usable, found.reason, found.accel) == (True, "a guest booted under KVM", Accel.KVM)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"word": "panic"}, "/dev/kvm opens, but the guest ended with status 0: panic"),
        ({"word": "Linux\nmcp-sandbox: the machine cannot start: this kernel has no vsock"}, "has no vsock"),
        ({"boots": ""}, "/dev/kvm opens, but no guest booted in 1 s"),
        ({"die": "start"}, "did not start for machine probe"),
    ],
)
async def test_a_kernel_that_does_not_boot_is_no_working_kvm(
    name: str, behaviour: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if "boots" in behaviour:  # it never ends
        monkeypatch.setattr(host, "KVM_DEADLINE_S", 1.0)
    found = await with_kernel(name, tmp_path, monkeypatch, **{"boots": STARTING[name], **behaviour})
    assert not found.usable
    assert reason in found.reason
    assert found.fix is not None


async def test_a_monitor_that_does_not_fit_this_host_is_not_chosen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its seccomp filter may forbid what its C library does, for example. It prints its version all the same."""
    found = await with_kernel(name, tmp_path, monkeypatch, False, die=STARTING[name])
    assert not found.usable
    assert "did not start machine probe" in found.reason
    assert found.fix == "set driver = qemu"


async def test_a_server_that_may_not_look_into_other_users_processes_is_told_what_it_lacks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def denied(_pid: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(api, "DENIED_S", 0.05)
    monkeypatch.setattr(api, "_root_and_socket", denied)
    found = await with_kernel(name, tmp_path, monkeypatch, False)
    assert not found.usable
    assert found.reason.endswith("Permission denied): in a container, give root CAP_SYS_PTRACE, too")
