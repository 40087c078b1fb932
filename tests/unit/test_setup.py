"""What `mcp-sandbox setup` decides and does, on hosts made of a directory of programs."""

import os
import re
from pathlib import Path
from typing import ClassVar, Self

import pytest

from mcp_sandbox.app import Drivers
from mcp_sandbox.commands import setup
from mcp_sandbox.commands.setup import NEEDS, driver_needs, make_plan
from mcp_sandbox.config import Settings
from vmm.driver import DRIVERS
from vmm.drivers.gvisor import RUNSC
from vmm.types import GUEST_KERNEL, Accel, Download, Need, Probe
from vmm.verdicts import Verdict

ORDINARY_UID = 54321  # unused


class StubDrivers:
    """Drivers that work once they have what they lack, except for hopeless ones."""

    hopeless: ClassVar[tuple[str, ...]]
    lacking: ClassVar[dict[str, Download]]
    accel: ClassVar[Accel | None] = None
    strict: ClassVar[bool] = False  # what they lack makes them unusable

    def __init__(self, *_: object) -> None:
        self.loaded: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def load(self, name: str) -> None:
        self.loaded.append(name)

    async def probe(self, name: str) -> Probe:
        usable = name not in self.hopeless and not (self.strict and name in self.lacking)
        program = Path("/program") if name in self.lacking else None
        return Probe(usable, "it is broken", "another host", self.accel, lacks=self.lacking.get(name), program=program)

    async def unload(self, name: str) -> None: ...

    async def fetch_and_probe(self, name: str) -> Probe:
        self.lacking.pop(name, None)
        return await self.probe(name)


@pytest.fixture(autouse=True)
def drivers(monkeypatch: pytest.MonkeyPatch) -> type[StubDrivers]:
    """A host without KVM, with drivers that need only their packages."""

    async def no_kvm(*_: object, **__: object) -> Verdict:
        return Verdict(False, "no KVM")

    monkeypatch.setattr("vmm.probe.kvm", no_kvm)
    monkeypatch.setattr(setup, "Drivers", StubDrivers)
    StubDrivers.hopeless, StubDrivers.lacking, StubDrivers.accel, StubDrivers.strict = (), {}, None, False
    return StubDrivers


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose only programs are in this directory; we are root."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr("vmm.process.SYSTEM_DIRS", ())
    monkeypatch.setattr(setup, "NEEDS", tuple(need for need in NEEDS if not need.what.startswith("/")))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return directory


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def add(directory: Path, name: str, script: str = "exit 0") -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


SETPRIV = 'shift; exec "$@"'  # we start other tools with it


def add_all(directory: Path, *, but: tuple[str, ...] = ()) -> None:
    for need in (*NEEDS, *(need for name in DRIVERS for need in driver_needs(name))):
        if not need.what.startswith("/") and need.what not in but:
            add(directory, need.what, SETPRIV if need.what == "setpriv" else "exit 0")


def test_a_host_that_has_everything_gets_one_line(programs, settings, capsys):
    add_all(programs)
    assert setup.main(settings, check=False) == 0
    assert capsys.readouterr().out == "Nothing is missing: gvisor works on this host (kernel isolation).\n"


def test_a_package_with_two_missing_programs_is_listed_once(programs, settings):
    add_all(programs, but=("unshare", "setpriv", "mkfs.erofs"))
    assert make_plan(settings, "gvisor").packages == ("util-linux", "erofs-utils")


def test_a_file_can_be_missing(programs, settings, tmp_path, monkeypatch):
    keyring = tmp_path / "keyring.gpg"
    monkeypatch.setattr(setup, "NEEDS", (Need(str(keyring), "keyring", "trust", "build"),))
    add_all(programs)
    assert make_plan(settings, "qemu").packages == ("keyring",)
    keyring.touch()
    assert make_plan(settings, "qemu").complete


def test_each_driver_needs_only_its_own_programs(programs, settings):
    add_all(programs, but=("qemu-system-x86_64", "mkfs.ext4", "bwrap"))
    assert make_plan(settings, "qemu").packages == ("qemu-system-x86", "e2fsprogs")
    assert make_plan(settings, "bubblewrap").packages == ("bubblewrap",)
    assert make_plan(settings, "gvisor").complete


def test_nftables_is_needed_only_if_sandboxes_may_have_a_network_device(programs, settings):
    assert "nftables" not in make_plan(settings, "gvisor").packages
    assert "nftables" in make_plan(settings.model_copy(update={"allow_nat": True}), "gvisor").packages


def test_tools_for_images_are_needed_only_on_request(programs, settings):
    add_all(programs)
    assert make_plan(settings, "gvisor").complete
    assert make_plan(settings, "gvisor", images=True).packages == ("skopeo", "buildah")


def test_without_kvm_qemu_is_not_needed_while_gvisor_works(programs, settings, drivers, capsys):
    add_all(programs, but=("qemu-system-x86_64", "mkfs.ext4"))
    drivers.lacking["gvisor"] = RUNSC
    assert setup.main(settings, check=True) == 1
    assert "`mcp-sandbox setup` fetches what is missing: gVisor" in capsys.readouterr().out
    assert setup.main(settings, check=False) == 0
    assert setup.main(settings, check=True) == 0
    assert "gvisor works on this host" in capsys.readouterr().out


def test_where_gvisor_does_not_work_setup_prints_why_and_sets_up_the_next_driver(programs, settings, drivers, capsys):
    add_all(programs, but=("qemu-system-x86_64",))
    add(programs, "apt-get", f'[ "$1" = update ] || cp {programs}/dpkg {programs}/qemu-system-x86_64')
    drivers.hopeless = ("gvisor",)
    assert setup.main(settings, check=False) == 0
    printed = capsys.readouterr()
    assert "gvisor is set up, but does not work: it is broken" in printed.err
    assert "qemu works on this host" in printed.out


@pytest.mark.parametrize("check", [True, False])
def test_with_kvm_a_driver_whose_program_no_package_has_is_passed_over(
    check, programs, settings, drivers, monkeypatch, capsys
):
    async def works(*_: object, **__: object) -> Verdict:
        return Verdict(True, "a tiny guest ran")

    add_all(programs, but=("lz4",))  # which only they need
    monkeypatch.setattr("vmm.probe.kvm", works)
    drivers.hopeless = ("firecracker", "cloud-hypervisor")
    drivers.accel = Accel.KVM
    assert setup.main(settings, check=check) == 0
    printed = capsys.readouterr().out
    assert "qemu works on this host" in printed
    assert "For a smaller monitor on this host's KVM: another host" in printed  # what the first one would need


def test_a_driver_that_no_package_has_gets_the_kernel_that_it_cannot_be_tried_without(programs, settings, drivers):
    add_all(programs)
    drivers.lacking, drivers.strict = {"firecracker": GUEST_KERNEL}, True
    assert setup.main(settings.model_copy(update={"driver": "firecracker"}), check=False) == 0
    assert drivers.lacking == {}


def test_a_driver_whose_program_is_there_gets_the_packages_that_it_cannot_be_tried_without(
    programs, settings, monkeypatch, capsys
):
    verdicts: dict[str, Probe] = {}

    class TryingDrivers(StubDrivers):
        async def probe(self, name: str) -> Probe:
            return verdicts.setdefault(name, Probe((programs / "lz4").exists(), "no lz4", program=Path("/program")))

        async def unload(self, name: str) -> None:
            del verdicts[name]

    add_all(programs, but=("lz4",))
    add(programs, "apt-get", f'[ "$1" = update ] || cp {programs}/dpkg {programs}/lz4')
    monkeypatch.setattr(setup, "Drivers", TryingDrivers)
    assert setup.main(settings.model_copy(update={"driver": "firecracker"}), check=False) == 0
    assert "firecracker works on this host" in capsys.readouterr().out


def test_setup_says_where_a_program_that_no_package_has_comes_from(programs, settings, monkeypatch, capsys):
    async def works(*_: object, **__: object) -> Verdict:
        return Verdict(True, "a tiny guest ran")

    add_all(programs)
    monkeypatch.setattr(setup, "Drivers", Drivers)
    monkeypatch.setattr("vmm.probe.kvm", works)
    assert setup.main(settings.model_copy(update={"driver": "cloud-hypervisor"}), check=False) == 1
    printed = capsys.readouterr().err.replace("\n", " ")
    assert "cloud-hypervisor is not installed" in printed
    assert "releases/download/vVERSION/" in printed
    assert "sha256sum" in printed


def test_setup_fails_if_the_driver_does_not_work_afterwards(programs, settings, drivers, capsys):
    add_all(programs)
    drivers.hopeless = ("bubblewrap",)
    assert setup.main(settings.model_copy(update={"driver": "bubblewrap"}), check=False) == 1
    assert "To fix it: another host" in capsys.readouterr().err


def test_an_ordinary_user_gets_one_command_that_installs_uidmap_and_grants_ids(programs, settings, monkeypatch, capsys):
    add_all(programs)
    monkeypatch.setattr(os, "geteuid", lambda: ORDINARY_UID)
    assert setup.main(settings, check=False) == 1
    output = capsys.readouterr().out
    install = "apt-get update && apt-get install -y --no-install-recommends uidmap"
    assert re.search(rf"{install} && usermod --add-subuids (\d+-\d+) --add-subgids \1 {ORDINARY_UID}\n", output)
    assert "Ask an administrator" in output


def test_subordinate_ids_are_found_by_name_or_number(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: ORDINARY_UID)
    (tmp_path / "subuid").write_text(f"somebody:100000:65536\n{ORDINARY_UID}:165536:65536\n")
    assert setup._user_without_ids(tmp_path) == str(ORDINARY_UID)  # no subgid yet
    (tmp_path / "subgid").write_text(f"{ORDINARY_UID}:165536:65536\n")
    assert setup._user_without_ids(tmp_path) is None


def test_ids_of_other_users_are_never_granted(tmp_path):
    assert setup._first_free_id(tmp_path) == 100_000
    (tmp_path / "subuid").write_text("# ids\nsomebody:100000:65536\nother:165536:65536\n")
    (tmp_path / "subgid").write_text("somebody:100000:65536\n")
    assert setup._first_free_id(tmp_path) == 231_072


def test_a_custom_guest_kernel_needs_a_static_busybox(programs, settings):
    add_all(programs)
    custom = settings.model_copy(update={"guest_kernel": Path("vmlinuz")})
    assert make_plan(settings, "qemu").complete
    assert make_plan(custom, "gvisor").complete
    assert make_plan(custom, "qemu").packages == ("busybox-static",)
    add(programs, "busybox", "# /lib64/ld-linux-x86-64.so.2")
    assert make_plan(custom, "qemu").packages == ("busybox-static",)
    add(programs, "busybox")
    assert make_plan(custom, "qemu").complete


def test_setup_installs_missing_packages_for_root(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    log = programs / "apt.log"
    install = f'echo "$DEBIAN_FRONTEND $*" >> {log}; [ "$1" = update ] || cp {programs}/dpkg {programs}/mmdebstrap'
    add(programs, "apt-get", install)
    assert setup.main(settings, check=False) == 0
    assert log.read_text().splitlines() == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends mmdebstrap",
    ]
    assert "creates the root file system of a template" in capsys.readouterr().out


def test_a_broken_package_source_does_not_stop_the_installation(programs, settings):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", f'[ "$1" != update ] && cp {programs}/dpkg {programs}/mmdebstrap')
    assert setup.main(settings, check=False) == 0


def test_a_failed_installation_prints_apts_output_and_the_log(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", "echo 'E: disk full'; exit 100")
    assert setup.main(settings, check=False) == 1
    shown = capsys.readouterr().err
    assert "apt-get ended with status 100" in shown
    assert "E: disk full" in shown
    assert "E: disk full" in (settings.home / "logs" / "setup.log").read_text()


def test_setup_fails_if_a_program_is_still_missing_afterwards(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    assert setup.main(settings, check=False) == 1
    assert "mmdebstrap is not on the PATH" in " ".join(capsys.readouterr().err.split())


def test_on_a_host_without_apt_setup_lists_the_programs_to_install(programs, settings, capsys):
    add_all(programs, but=("apt-get", "mkfs.erofs"))
    assert setup.main(settings, check=False) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "mkfs.erofs" in shown
    assert "apt-get install" not in shown
    assert "packages may have other names" in shown


def test_checking_installs_nothing(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", f"touch {programs}/called")
    assert setup.main(settings, check=True) == 1
    assert not (programs / "called").exists()
    assert "As root, run this command" in capsys.readouterr().out
