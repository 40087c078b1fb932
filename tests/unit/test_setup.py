"""What `mcp-sandbox setup` decides and does, on hosts that are a directory of programs."""

import os
import re
from pathlib import Path
from typing import ClassVar, Self

import pytest

from mcp_sandbox.commands import setup
from mcp_sandbox.commands.setup import NEEDS, driver_needs, make_plan
from mcp_sandbox.config import Settings
from vmm.driver import DRIVERS
from vmm.types import Download, Need, Probe
from vmm.verdicts import Verdict

ORDINARY_UID = 54321  # nobody's


class StubDrivers:
    """Drivers that work as soon as they have been equipped, except for those that never do."""

    hopeless: ClassVar[tuple[str, ...]]
    lacking: ClassVar[dict[str, Download]]

    def __init__(self, *_: object) -> None:
        self.loaded: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def load(self, name: str) -> None:
        self.loaded.append(name)

    async def ask(self, name: str) -> Probe:
        usable = name not in self.hopeless
        return Probe(usable, "it told us so", "another host", lacks=self.lacking.get(name))

    async def ask_after_fetching(self, name: str) -> Probe:
        self.lacking.pop(name, None)
        return await self.ask(name)


@pytest.fixture(autouse=True)
def drivers(monkeypatch: pytest.MonkeyPatch) -> type[StubDrivers]:
    """This host has no KVM, and drivers that depend on nothing but their packages."""

    async def no_kvm(*_: object, **__: object) -> Verdict:
        return Verdict(False, "no KVM")

    monkeypatch.setattr("vmm.probe.kvm", no_kvm)
    monkeypatch.setattr(setup, "Drivers", StubDrivers)
    StubDrivers.hopeless, StubDrivers.lacking = (), {}
    return StubDrivers


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host, as root sees it: every program there is lies in this directory."""
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


SETPRIV = 'shift; exec "$@"'  # what we start other tools with


def add_all(directory: Path, *, but: tuple[str, ...] = ()) -> None:
    for need in (*NEEDS, *(need for name in DRIVERS for need in driver_needs(name))):
        if not need.what.startswith("/") and need.what not in but:
            add(directory, need.what, SETPRIV if need.what == "setpriv" else "exit 0")


def test_a_host_that_has_everything_is_told_so_in_one_line(programs, settings, capsys):
    add_all(programs)
    assert setup.main(settings, check=False) == 0
    assert capsys.readouterr().out == "Nothing is missing: gvisor runs machines here (kernel isolation).\n"


def test_a_package_that_brings_two_missing_programs_is_named_once(programs, settings):
    add_all(programs, but=("unshare", "setpriv", "mkfs.erofs"))
    assert make_plan(settings, "gvisor").packages == ("util-linux", "erofs-utils")


def test_a_file_can_be_needed_too(programs, settings, tmp_path, monkeypatch):
    keyring = tmp_path / "keyring.gpg"
    monkeypatch.setattr(setup, "NEEDS", (Need(str(keyring), "keyring", "trust", "build"),))
    add_all(programs)
    assert make_plan(settings, "qemu").packages == ("keyring",)
    keyring.touch()
    assert make_plan(settings, "qemu").complete


def test_each_driver_needs_its_own_programs_only(programs, settings):
    add_all(programs, but=("qemu-system-x86_64", "mkfs.ext4", "bwrap"))
    assert make_plan(settings, "qemu").packages == ("qemu-system-x86", "e2fsprogs")
    assert make_plan(settings, "bubblewrap").packages == ("bubblewrap",)
    assert make_plan(settings, "gvisor").complete


def test_tools_for_images_are_got_when_somebody_asks_for_them(programs, settings):
    add_all(programs)
    assert make_plan(settings, "gvisor").complete
    assert make_plan(settings, "gvisor", images=True).packages == ("skopeo", "buildah")


def test_without_kvm_nobody_is_asked_for_qemu(programs, settings, drivers, capsys):
    add_all(programs, but=("qemu-system-x86_64", "mkfs.ext4"))
    drivers.lacking["gvisor"] = Download.RUNSC
    assert setup.main(settings, check=True) == 1
    assert "no gVisor: `mcp-sandbox setup` fetches it" in capsys.readouterr().out
    assert setup.main(settings, check=False) == 0
    assert setup.main(settings, check=True) == 0
    assert "gvisor runs machines here" in capsys.readouterr().out


def test_where_gvisor_does_not_work_the_next_driver_is_set_up_and_the_reason_told(programs, settings, drivers, capsys):
    add_all(programs, but=("qemu-system-x86_64",))
    add(programs, "apt-get", f'[ "$1" = update ] || cp {programs}/dpkg {programs}/qemu-system-x86_64')
    drivers.hopeless = ("gvisor",)
    assert setup.main(settings, check=False) == 0
    told = capsys.readouterr()
    assert "gvisor has all it needs, but it told us so" in told.err
    assert "qemu runs machines here" in told.out


def test_a_driver_that_has_all_it_needs_and_does_not_work_is_no_success(programs, settings, drivers, capsys):
    add_all(programs)
    drivers.hopeless = ("bubblewrap",)
    assert setup.main(settings.model_copy(update={"driver": "bubblewrap"}), check=False) == 1
    assert "To fix it: another host" in capsys.readouterr().err


def test_an_ordinary_user_needs_a_helper_and_ids_and_gets_one_command_for_both(programs, settings, monkeypatch, capsys):
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


def test_ids_of_other_users_are_never_offered(tmp_path):
    assert setup._first_free_id(tmp_path) == 100_000
    (tmp_path / "subuid").write_text("# ids\nsomebody:100000:65536\nother:165536:65536\n")
    (tmp_path / "subgid").write_text("somebody:100000:65536\n")
    assert setup._first_free_id(tmp_path) == 231_072


def test_only_a_kernel_of_the_users_own_needs_busybox_and_only_a_static_one_will_do(programs, settings):
    add_all(programs)
    own = settings.model_copy(update={"guest_kernel": Path("vmlinuz")})
    assert make_plan(settings, "qemu").complete
    assert make_plan(own, "gvisor").complete
    assert make_plan(own, "qemu").packages == ("busybox-static",)
    add(programs, "busybox", "# /lib64/ld-linux-x86-64.so.2")
    assert make_plan(own, "qemu").packages == ("busybox-static",)
    add(programs, "busybox")
    assert make_plan(own, "qemu").complete


def test_root_gets_the_missing_packages_installed(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    log = programs / "apt.log"
    install = f'echo "$DEBIAN_FRONTEND $*" >> {log}; [ "$1" = update ] || cp {programs}/dpkg {programs}/mmdebstrap'
    add(programs, "apt-get", install)
    assert setup.main(settings, check=False) == 0
    assert log.read_text().splitlines() == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends mmdebstrap",
    ]
    assert "puts a sandbox's Debian together" in capsys.readouterr().out


def test_a_broken_package_source_does_not_stop_what_can_be_installed(programs, settings):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", f'[ "$1" != update ] && cp {programs}/dpkg {programs}/mmdebstrap')
    assert setup.main(settings, check=False) == 0


def test_a_failed_installation_shows_what_apt_said_and_where_its_log_is(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", "echo 'E: no room left'; exit 100")
    assert setup.main(settings, check=False) == 1
    shown = capsys.readouterr().err
    assert "apt-get ended with status 100" in shown
    assert "E: no room left" in shown
    assert "E: no room left" in (settings.home / "logs" / "setup.log").read_text()


def test_an_installation_that_brings_nothing_is_not_called_a_success(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    assert setup.main(settings, check=False) == 1
    assert "mmdebstrap cannot be found" in " ".join(capsys.readouterr().err.split())


def test_a_host_without_apt_is_told_what_to_install_by_other_means(programs, settings, capsys):
    add_all(programs, but=("apt-get", "mkfs.erofs"))
    assert setup.main(settings, check=False) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "mkfs.erofs" in shown
    assert "apt-get install" not in shown
    assert "packages may have other names there" in shown


def test_checking_installs_nothing(programs, settings, capsys):
    add_all(programs, but=("mmdebstrap",))
    add(programs, "apt-get", f"touch {programs}/called")
    assert setup.main(settings, check=True) == 1
    assert not (programs / "called").exists()
    assert "As root run this one command" in capsys.readouterr().out
