"""Drivers of microVMs whose monitor is `fake_monitor.py`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vmm import vmlinux
from vmm.driver import DriverConfig, load_driver
from vmm.microvm import api, probe
from vmm.microvm import driver as driver_module
from vmm.microvm.driver import MicroVmDriver
from vmm.microvm.probe import Engine
from vmm.process import Confinement
from vmm.types import GuestKernel, MachineSpec, Probe

FAKE = Path(__file__).parent / "fake_monitor.py"
NAMES = ("firecracker", "cloud-hypervisor")
MEMORY_MB = 4


class FakeMonitors:
    """Makes drivers, and knows what their monitors were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.roots: list[Path] = []  # of the machines so far
        self._monkeypatch = monkeypatch
        self._log = folder / "requests.log"

    @property
    def asked(self) -> list[Any]:
        """Return the requests that monitors have got: method, path and body."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    @property
    def spec(self) -> MachineSpec:
        """Return a small machine."""
        kernel = self.folder / "vmlinux"
        kernel.write_bytes(vmlinux.ELF + b"kernel")
        for name in ("initramfs", "root"):
            (self.folder / name).write_bytes(b"content")
        boot = GuestKernel(kernel, self.folder / "initramfs")
        return MachineSpec("box", self.folder / "root", boot, memory_mb=MEMORY_MB, vcpus=2, disk_mb=64)

    def folders(self, *names: str) -> list[Path]:
        """Return new directories for snapshots."""
        made = [self.folder / name for name in names]
        for path in made:
            path.mkdir()
        return made

    def driver(self, name: str, **behaviour: object) -> MicroVmDriver:
        """Return a driver whose monitor behaves as asked."""

        def in_machine(
            _argv: Sequence[str], files: Mapping[str, int], *, folder: str | None = None, **_: object
        ) -> list[str]:
            root = self.folder / f"root{len(self.roots)}"
            (root / (folder or "").lstrip("/")).mkdir(parents=True)
            (root / "files").mkdir()
            for link in files:
                if link.count("/") == 2:
                    (root / link.lstrip("/")).symlink_to("/proc/self/fd/0")
            self.roots.append(root)
            self._monkeypatch.setattr(api, "ROOT", str(root))
            told = {"log": str(self._log), "root": str(root), "memory_mb": MEMORY_MB}
            return [sys.executable, str(FAKE), name, json.dumps(dict(files)), json.dumps(told | behaviour)]

        self._monkeypatch.setattr(probe, "in_machine", in_machine)
        self._monkeypatch.setattr(driver_module, "kvm_confinement", lambda *, offline: Confinement(offline=offline))
        made = load_driver(name, DriverConfig(run_dir=self.folder / "run", cache_dir=self.folder / "cache"))
        assert isinstance(made, MicroVmDriver)
        made._verdict, made._engine = Probe(True, "it works"), Engine(str(FAKE), "a monitor 1.2", (1, 2))
        return made
