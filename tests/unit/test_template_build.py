"""Builds with fake tools and machines."""

import io
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from guest.client.messages import WarmUp
from guest.errors import AgentTimeout
from templates import apt_sources, image
from templates.build import Builder, BuiltTemplate, Progress
from templates.catalogue import Catalogue
from templates.errors import BuildFailed
from templates.inventory import ImagePlan, Inventory
from templates.model import Template
from templates.namespaces import Private
from templates.store import Store
from templates.tools import LoggedTools, StepFailed
from tests.contract.toy_driver import TOYCTL
from tests.unit.fake_driver import FakeDriver
from vmm.driver import Driver
from vmm.drivers.gvisor import RUNSC
from vmm.types import GUEST_KERNEL, Capabilities, GuestCode, GuestKernel, Isolation

pytestmark = pytest.mark.anyio


def template(**changes: Any) -> Template:
    fields = {
        "name": "tiny",
        "folder": Path("/templates/tiny"),
        "title": "T",
        "description": "D",
        "language": "python",
        "source": {"debian": {"suite": "bookworm", "packages": [], "wheels": ["numpy==2.4.6"]}},
        "machine": {"memory_mb": 128, "disk_mb": 64},
        "warmup": {"code": "import numpy"},
    }
    return Template.model_validate(fields | changes)


class FakeVm(FakeDriver):
    """Boots a kernel and takes snapshots, as QEMU does."""

    name = "vm"
    capabilities = Capabilities(Isolation.VM, snapshot=True)


class FakeGvisor(FakeDriver):
    """Starts the agent without a kernel and takes snapshots, as gVisor does."""

    name = "gvisor"
    capabilities = Capabilities(Isolation.KERNEL, snapshot=True)


class FakeJail(FakeDriver):
    """Runs machines in a directory tree and takes no snapshots, as bubblewrap does."""

    name = "jail"
    capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")


class Workshop:
    """Stands in for every tool of a build, records the calls and fails on demand."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.argv: list[Sequence[str]] = []
        self.env: dict[str, Mapping[str, str]] = {}  # by tool
        self.broken: str | None = None
        self.hanging: str | None = None
        self.simulated: list[str] = []  # what a simulated upgrade prints
        self.newest = ["linux_6.1_amd64"]  # packages in the archive
        self.started = anyio.Event()
        self.on_sh: Callable[[Sequence[str]], None] = lambda _argv: None

    def tools(self, log_path: Path, on_line: Callable[[str], None]) -> "FakeTools":
        return FakeTools(self, LoggedTools(log_path, on_line))


class FakeTools:
    def __init__(self, workshop: Workshop, log: LoggedTools) -> None:
        self._workshop = workshop
        self._log = log

    def note(self, text: str) -> None:
        self._log.note(text)

    async def run(
        self,
        argv: Sequence[str],
        *,
        private: Private | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        shop = self._workshop
        tool = Path(argv[0]).name
        if tool.startswith("ld-linux"):
            tool = "pip" if "install" in argv else "compileall"
        shop.ran.append(tool)
        shop.argv.append(argv)
        shop.env[tool] = env or {}
        self.note(f"I am {tool}")
        if tool == shop.hanging:
            shop.started.set()
            await anyio.sleep_forever()
        if tool == shop.broken:
            self.note("E: out of luck")
            raise StepFailed(f"{tool} ended with status 1")
        if tool == "sh":
            shop.on_sh(argv)
        return self._fake_output(tool, argv, cwd)

    def _fake_output(self, tool: str, argv: Sequence[str], cwd: Path | None) -> list[str]:
        match tool:
            case "mmdebstrap":
                _pack_base(Path(next(word for word in argv if word.endswith("/base.tar"))))
            case "tar" if argv[-1].endswith("dpkg/status"):
                return []
            case "tar":
                _grow_tree(Path(argv[-1].partition("=")[2]))
            case "pip":
                _install_fakes(Path(argv[argv.index("--target") + 1]), [word for word in argv if "==" in word])
            case "mkfs.erofs":
                Path(argv[-2]).write_text("erofs")
            case "fsck.erofs":
                _grow_tree(unpacked := Path(argv[1].partition("=")[2]))
                (unpacked / "tmp").mkdir()
                (unpacked / "tmp").chmod(0o1777)
            case "apt-cache" | "apt-get":
                return self._fake_apt(argv, cwd)
            case "dpkg":
                tree = Path(argv[-1])
                for name in (
                    "boot/vmlinuz-6.1",
                    "bin/busybox",
                    "lib/modules/6.1/kernel/overlay.ko",
                    "usr/bin/runsc",
                    "usr/bin/toyctl",
                ):
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    (tree / name).write_text(name)
        return []

    def _fake_apt(self, argv: Sequence[str], cwd: Path | None) -> list[str]:
        if "depends" in argv:
            return ["linux-image-cloud-amd64", "  Depends: linux-image-6.1-cloud-amd64"]
        if "--simulate" in argv:
            return self._workshop.simulated
        if "--print-uris" in argv:
            return [f"'http://mirror.example/{name}' {name}.deb 1 SHA256:0" for name in self._workshop.newest]
        if "download" in argv:
            assert cwd is not None
            (cwd / "linux_6.1_amd64.deb").write_text("")
        return []


def _pack_base(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        hostname = tarfile.TarInfo("./etc/hostname")
        hostname.size = 3
        tar.addfile(hostname, io.BytesIO(b"box"))


def _grow_tree(tree: Path) -> None:
    for name in ("etc/apt", "usr/bin", "usr/lib/x86_64-linux-gnu", "usr/lib/python3.11"):
        (tree / name).mkdir(parents=True)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (tree / "usr/bin/python3").symlink_to("python3.11")
    (tree / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2").write_text("")


def _install_fakes(target: Path, wheels: Sequence[str]) -> None:
    """Install what pip would: of each package a module in a shared namespace, its version and a script."""
    for folder in ("shared", "bin"):
        (target / folder).mkdir(parents=True)
    for name, version in (wheel.split("==") for wheel in wheels):
        (target / f"shared/{name}.py").write_text("")
        (target / f"{name}-{version}.dist-info").mkdir()
        header = "#!/bin/sh\n'''exec' /host/python \"$0\" \"$@\"\n' '''\n"
        (target / f"bin/{name}").write_text(f"{header}import {name}\n")


class FakeAgent:
    """Stands in for AgentClient and records warm-ups."""

    warmed: list[str]
    error: Exception | None

    @classmethod
    @asynccontextmanager
    async def open(cls, stream: Any, *, timeout_s: float) -> AsyncIterator["FakeAgent"]:
        yield cls()

    async def warm(self, warm_up: WarmUp, timeout_s: float) -> None:
        self.warmed.append(warm_up.code)
        if self.error:
            raise self.error


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[FakeAgent]:
    monkeypatch.setattr("guest.client.AgentClient", FakeAgent)
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: "bookworm")
    monkeypatch.setattr("templates.apt_sources.sources_for", lambda suite: f"Suites: {suite}\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    FakeAgent.warmed = []
    FakeAgent.error = None
    return FakeAgent


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture
def builder(tmp_path: Path, workshop: Workshop, agent: type[FakeAgent]) -> Builder:
    return Builder(Store(tmp_path), make_tools=workshop.tools)


def staged(home: Path) -> list[Path]:
    return list(home.glob("staging/*"))


async def test_a_build_makes_an_image_a_kernel_and_a_warm_snapshot(
    builder: Builder, agent: type[FakeAgent], tmp_path: Path
):
    driver = FakeVm()
    built = await builder.build(template(), driver)
    assert built.root.read_text() == "erofs"
    assert isinstance(built.boot, GuestKernel)
    assert built.boot.vmlinuz.read_text() == "boot/vmlinuz-6.1"
    assert built.boot.initramfs.is_file()
    assert built.snapshot is not None
    assert (built.snapshot.path / "state").is_file()
    assert built.snapshot.driver == "vm"
    assert built.spec("m1").memory_mb == 128
    assert agent.warmed == ["import numpy"]
    assert driver.running == []
    assert staged(tmp_path) == []


async def test_a_driver_without_a_kernel_gets_the_agents_archive_and_downloads_nothing(
    builder: Builder, workshop: Workshop, agent: type[FakeAgent], tmp_path: Path
):
    built = await builder.build(template(), FakeGvisor())
    assert built.root.read_text() == "erofs"
    assert isinstance(built.boot, GuestCode)
    assert tarfile.is_tarfile(built.boot.archive)
    assert built.snapshot is not None
    assert agent.warmed == ["import numpy"]
    assert {entry.kind for entry in Store(tmp_path).entries()} == {"base", "image", "agent", "snapshot"}
    assert "apt-get" not in workshop.ran


async def test_a_driver_that_needs_a_tree_gets_the_unpacked_image_and_no_snapshot(
    builder: Builder, workshop: Workshop, agent: type[FakeAgent], tmp_path: Path
):
    driver = FakeJail()
    built = await builder.build(template(), driver)
    assert (built.root / "usr/bin/python3").is_symlink()
    assert (built.root / "tmp").stat().st_mode & 0o7777 == 0o755, "machines share the tree"
    assert isinstance(built.boot, GuestCode)
    assert built.snapshot is None
    assert (agent.warmed, driver.launched) == ([], 0)
    kinds = {entry.kind for entry in Store(tmp_path).entries()}
    assert kinds == {"base", "image", "tree", "agent"}
    assert {entry.kind for entry in builder.entries_of(template())} == {"image", "tree"}
    workshop.ran.clear()
    assert await builder.build(template(), driver) == built == await builder.find(template(), driver)
    assert workshop.ran == []


async def test_a_tree_is_unpacked_again_when_its_image_is_rebuilt(builder: Builder, tmp_path: Path):
    first = await builder.build(template(), FakeJail())
    (image_entry,) = [entry for entry in Store(tmp_path).entries() if entry.kind == "image"]
    await Store(tmp_path).remove("image", image_entry.key)
    assert await builder.find(template(), FakeJail()) is None
    second = await builder.build(template(), FakeJail())
    assert second.root != first.root
    assert [entry.path for entry in await builder.outdated(template(), FakeJail())] == [first.root.parent]


async def test_a_build_removed_from_the_store_no_longer_exists(builder: Builder, tmp_path: Path):
    for driver, kind in ((FakeVm(), "snapshot"), (FakeJail(), "tree")):
        built = await builder.build(template(), driver)
        assert built.exists()
        (entry,) = [entry for entry in Store(tmp_path).entries() if entry.kind == kind]
        await Store(tmp_path).remove(kind, entry.key)
        assert not built.exists()


async def test_a_second_build_without_changes_does_nothing(builder: Builder, workshop: Workshop):
    driver = FakeVm()
    built = await builder.build(template(), driver)
    workshop.ran.clear()
    assert await builder.build(template(), driver) == built
    assert await builder.find(template(), driver) == built
    assert builder.find_kernel() == built.boot
    assert workshop.ran == []
    assert driver.launched == 1


async def test_nothing_is_found_before_it_is_built(builder: Builder, workshop: Workshop):
    assert await builder.find(template(), FakeVm()) is None
    assert builder.find_kernel() is None
    assert workshop.ran == []


async def test_a_change_rebuilds_only_what_depends_on_it(builder: Builder, workshop: Workshop):
    driver = FakeVm()
    await builder.build(template(), driver)
    workshop.ran.clear()
    await builder.build(template(warmup={"code": "import os"}), driver)
    assert (workshop.ran, driver.launched) == ([], 2)
    source = {"debian": {"suite": "bookworm", "wheels": ["numpy==2.4.7"]}}
    await builder.build(template(source=source), driver)
    assert (workshop.ran, driver.launched) == (["tar", "pip", "compileall", "compileall", "mkfs.erofs"], 3)


async def test_more_packages_are_a_layer_on_the_shared_base(builder: Builder, workshop: Workshop):
    await builder.build_image(template())
    workshop.ran.clear()
    workshop.argv.clear()
    source = {"debian": {"suite": "bookworm", "packages": ["jq"], "wheels": []}}
    await builder.build_image(template(source=source))
    assert workshop.ran == ["mmdebstrap", "tar", "compileall", "tar", "compileall", "mkfs.erofs"]
    assert any(word.startswith("--setup-hook=tar ") for word in workshop.argv[0])
    (install,) = (word for word in workshop.argv[0] if "apt-get" in word)
    assert install.startswith("--customize-hook=")
    assert install.endswith(" install jq")


async def test_a_base_is_not_passed_through_mmdebstraps_filter(builder: Builder, workshop: Workshop):
    """It starts a Python for every package, which took longer than everything else."""
    await builder.build_image(template())
    assert workshop.ran[0] == "mmdebstrap"
    assert not any(word.startswith("--dpkgopt") for word in workshop.argv[0])
    assert any("path-exclude=/usr/share/doc/*" in word for word in workshop.argv[0])


async def test_only_pip_is_given_the_operators_settings(
    builder: Builder, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_INDEX_URL", "with a password")
    monkeypatch.setenv("SECRET_TOKEN", "of the operator")
    await builder.build_image(template())
    assert {"mmdebstrap", "tar", "pip", "compileall", "mkfs.erofs"} == set(workshop.env)
    assert [tool for tool, env in workshop.env.items() if "PIP_INDEX_URL" in env] == ["pip"]
    assert not any("SECRET_TOKEN" in env for env in workshop.env.values())


async def test_commands_run_in_the_image_after_its_packages_and_are_part_of_its_key(
    builder: Builder, workshop: Workshop
):
    source = {"debian": {"suite": "bookworm", "run": ["echo 'a b' >/etc/motd", "true"]}}
    await builder.build_image(template(source=source))
    hooks = [word for word in workshop.argv[1] if word.startswith("--customize-hook=")]
    assert hooks[0] == """--customize-hook=chroot "$1" env HOME=/root sh -ec 'echo '"'"'a b'"'"' >/etc/motd'"""
    assert hooks[1] == """--customize-hook=chroot "$1" env HOME=/root sh -ec true"""
    workshop.ran.clear()
    await builder.build_image(template(source=source))
    assert workshop.ran == []
    await builder.build_image(template(source={"debian": {"suite": "bookworm", "run": ["true"]}}))
    assert workshop.ran[0] == "mmdebstrap"


async def test_wheels_with_all_their_dependencies_are_installed_side_by_side_without_resolving(
    builder: Builder, workshop: Workshop, tmp_path: Path
):
    dependencies = [f"b{i}=={i}" for i in range(9)]
    debian = {"suite": "bookworm", "wheels": ["a==1"], "dependencies": dependencies}
    await builder.build_image(template(source={"debian": debian}))
    installs = [argv for argv in workshop.argv if "install" in argv]
    assert len(installs) > 1
    assert all("--no-deps" in argv for argv in installs)
    named = sorted(word for argv in installs for word in argv if "==" in word)
    assert named == sorted(["a==1", *dependencies])
    (entry,) = [entry for entry in Store(tmp_path).entries() if entry.kind == "image"]
    assert entry.details["wheels"] == named


async def test_dependencies_that_are_not_named_are_left_to_pip(builder: Builder, workshop: Workshop):
    await builder.build_image(template())
    assert [("--no-deps" in argv) for argv in workshop.argv if "install" in argv] == [False]


async def test_finishing_commands_run_in_the_tree_that_has_the_wheels(builder: Builder, workshop: Workshop):
    seen: list[tuple[str, bool, str]] = []

    def look(command: Sequence[str]) -> None:
        tree = Path(command[-2])
        site = tree / "usr/local/lib/python3.11/dist-packages"
        seen.append((command[-1], (site / "shared/a.py").exists(), (tree / "usr/local/bin/a").read_text()))

    workshop.on_sh = look
    debian = {"suite": "bookworm", "packages": ["jq"], "wheels": ["a==1"], "finish": ["true"]}
    await builder.build_image(template(source={"debian": debian}))
    assert seen == [("true", True, "#!/usr/bin/python3\nimport a\n")]
    workshop.ran.clear()
    await builder.build_image(template(source={"debian": {**debian, "finish": []}}))
    assert "sh" not in workshop.ran
    assert "pip" in workshop.ran


@pytest.mark.parametrize("host_has_sources", [True, False])
async def test_a_package_of_another_suite_needs_that_suites_sources(
    builder: Builder, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, host_has_sources: bool
):
    monkeypatch.setattr(apt_sources, "sources_for", lambda suite: f"Suites: {suite}\n" if host_has_sources else None)
    source = {"debian": {"suite": "bookworm", "packages": ["golang-go/trixie"]}}
    if host_has_sources:
        await builder.build_image(template(source=source))
        assert any(word.endswith(" install golang-go/trixie") for word in workshop.argv[1])
        assert any("Default-Release" in word and "bookworm" in word for word in workshop.argv[1])
    else:
        with pytest.raises(BuildFailed, match="packages of trixie can only be installed on a Debian host"):
            await builder.build_image(template(source=source))


async def test_a_base_has_no_devices_because_ordinary_users_cannot_unpack_them(
    builder: Builder, workshop: Workshop, tmp_path: Path
):
    await builder.build_image(template())
    assert "--skip=output/dev" in workshop.argv[workshop.ran.index("mmdebstrap")]
    (base,) = tmp_path.glob("base/*/base.tar")
    assert sorted(path.name for path in base.parent.iterdir()) == ["base.tar", "meta.json"]


async def test_a_snapshot_is_only_used_with_the_image_it_was_taken_with(builder: Builder, tmp_path: Path):
    driver = FakeVm()
    built = await builder.build(template(), driver)
    await Store(tmp_path).remove("image", built.root.parent.name)
    again = await builder.build(template(), driver)
    assert built.snapshot is not None
    assert again.root == built.root
    assert again.snapshot != built.snapshot
    assert [entry.path for entry in await builder.outdated(template(), driver)] == [built.snapshot.path]


async def test_of_snapshots_in_other_sizes_the_last_are_kept(builder: Builder):
    driver, own = FakeVm(), template()
    sizes = [own.machine.model_copy(update={"memory_mb": 128 + more}) for more in range(4)]
    for size in sizes:  # the first is the template's own
        await builder.build(own.resized(size), driver)
    await builder.remove_resized(own, driver, keep=2)
    found = [await builder.find(own.resized(size), driver) is not None for size in sizes]
    assert (found[0], sum(found)) == (True, 3)


async def test_a_build_with_a_service_is_not_outdated_at_once(builder: Builder):
    driver = FakeVm()
    with_service = template(service={"start_cmd": "serve", "ready_cmd": "ask"}, env={"A": "1"})
    await builder.build(with_service, driver)
    assert await builder.outdated(with_service, driver) == []


async def test_shared_entries_are_outdated_when_no_template_uses_them(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
):
    driver = FakeVm()
    await builder.build(template(), driver)
    assert await builder.outdated(template(), driver) == []
    monkeypatch.setattr("templates.kernel.RECIPE", 1_000)
    monkeypatch.setattr("templates.debian.RECIPE", 1_000)
    await builder.build(template(), driver)
    kinds = [entry.kind for entry in await builder.outdated(template(), driver)]
    assert sorted(kinds) == ["base", "image", "initramfs", "kernel", "snapshot"]


@pytest.mark.parametrize("last", [FakeVm, FakeGvisor, FakeJail])
async def test_building_for_one_driver_keeps_the_entries_of_others(builder: Builder, last: type[FakeDriver]):
    await builder.build_program(RUNSC)
    for driver in (FakeVm(), FakeGvisor(), FakeJail(), last()):
        await builder.build(template(), driver)
    assert await builder.outdated(template(), last()) == []


async def test_another_drivers_snapshot_of_old_entries_is_outdated(builder: Builder, monkeypatch: pytest.MonkeyPatch):
    for driver in (FakeVm(), FakeGvisor(), FakeJail()):
        await builder.build(template(), driver)
    changed = template(warmup={"code": "import os"})
    await builder.build(changed, FakeJail())
    kinds = [(entry.kind, entry.details.get("driver")) for entry in await builder.outdated(changed, FakeJail())]
    assert kinds == [("snapshot", "gvisor"), ("snapshot", "vm")] or kinds == [
        ("snapshot", "vm"),
        ("snapshot", "gvisor"),
    ]
    monkeypatch.setattr("templates.image.RECIPE", 1_000)
    await builder.build(template(), FakeJail())
    outdated = await builder.outdated(template(), FakeJail())
    assert sorted(entry.kind for entry in outdated) == ["image", "snapshot", "snapshot", "tree"]


async def test_nothing_is_outdated_before_the_template_is_rebuilt(builder: Builder):
    await builder.build(template(), FakeVm())
    assert await builder.outdated(template(), FakeGvisor()) == []


async def test_guest_code_entries_are_outdated_when_the_code_changes(builder: Builder, monkeypatch: pytest.MonkeyPatch):
    for driver in (FakeVm(), FakeGvisor()):
        await builder.build(template(), driver)
    for module in ("guest_code", "kernel"):
        monkeypatch.setattr(f"templates.{module}.guest_files", lambda: {"guest/agent.py": b"other"})
    await builder.build(template(), FakeGvisor())
    outdated = await builder.outdated(template(), FakeGvisor())
    assert sorted(entry.kind for entry in outdated) == ["agent", "initramfs", "snapshot", "snapshot"]


# -- unused entries ---------------------------------------------------------------------------------------

MINE = """
title = "T"
description = "D"
language = "python"
source.debian = { suite = "bookworm", wheels = ["numpy==2.4.6"] }
machine = { memory_mb = 128, disk_mb = 64 }
warmup.code = "import numpy"
"""


class Shop:
    """A builder with a catalogue of templates that tests write."""

    def __init__(self, path: Path, workshop: Workshop) -> None:
        self.path = path
        self.store = Store(path / "home")
        self.catalogue = Catalogue([path / "templates"])
        self.builder = Builder(self.store, make_tools=workshop.tools, catalogue=self.catalogue)

    def write(self, name: str, text: str = MINE) -> Template:
        folder = self.path / "templates" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "template.toml").write_text(text)
        return self.catalogue.load(name)

    async def build(self, name: str, driver: Driver, text: str = MINE) -> BuiltTemplate:
        return await self.builder.build(self.write(name, text), driver)

    async def unused(self, *drivers: Driver) -> list[tuple[str, str | None]]:
        return sorted((entry.kind, entry.details.get("template")) for entry in await self.builder.unused(drivers))


@pytest.fixture
def shop(tmp_path: Path, workshop: Workshop, agent: type[FakeAgent]) -> Shop:
    return Shop(tmp_path, workshop)


async def test_nothing_is_unused_while_templates_are_unchanged(shop: Shop):
    for driver in (FakeVm(), FakeGvisor(), FakeJail()):
        await shop.build("mine", driver)
    assert await shop.unused(FakeVm(), FakeGvisor()) == []


async def test_an_older_version_of_a_template_is_unused(shop: Shop):
    for code in ("import os", "import re"):
        await shop.build("mine", FakeGvisor(), MINE.replace("import numpy", code))
    assert await shop.unused(FakeGvisor()) == [("snapshot", "mine")]


async def test_the_build_of_a_deleted_template_is_unused(shop: Shop):
    await shop.build("mine", FakeGvisor())
    await shop.build("other", FakeGvisor(), MINE.replace("numpy==2.4.6", "numpy==2.4.7"))
    shutil.rmtree(shop.path / "templates" / "mine")
    assert await shop.unused(FakeGvisor()) == [("image", "mine"), ("snapshot", "mine")]


async def test_a_template_with_errors_keeps_its_build(shop: Shop):
    await shop.build("mine", FakeGvisor())
    (shop.path / "templates" / "mine" / "template.toml").write_text("title =")
    assert await shop.unused(FakeGvisor()) == []


async def test_a_template_with_unreadable_files_keeps_its_build(shop: Shop, monkeypatch: pytest.MonkeyPatch):
    await shop.build("mine", FakeGvisor(), MINE.replace("numpy==2.4.6", "numpy==2.4.7"))
    shop.write("mine", MINE.replace("numpy==2.4.6", "numpy==2.4.8"))
    assert await shop.unused(FakeGvisor()) == [("image", "mine"), ("snapshot", "mine")]
    plan = Inventory.plan_image

    def refuse(self: Inventory, template: Template) -> ImagePlan:
        if template.name == "mine":
            raise PermissionError("secret")
        return plan(self, template)

    monkeypatch.setattr(Inventory, "plan_image", refuse)
    assert await shop.unused(FakeGvisor()) == []


async def test_a_snapshot_that_does_not_fit_its_driver_is_unused_if_that_driver_is_usable(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
):
    await shop.build("mine", FakeGvisor())

    async def newer(_driver: FakeDriver) -> str:
        return "newer"

    monkeypatch.setattr(FakeGvisor, "fingerprint", newer)
    assert await shop.unused(FakeJail()) == []
    assert await shop.unused(FakeGvisor()) == [("snapshot", "mine")]


async def test_templates_with_the_same_inputs_share_entries_that_neither_removes(shop: Shop):
    built = await shop.build("mine", FakeGvisor())
    twin = await shop.build("twin", FakeGvisor())
    assert (twin.root, twin.snapshot) == (built.root, built.snapshot)
    for template in (built.template, twin.template):
        assert {entry.kind for entry in shop.builder.entries_of(template)} == {"image", "snapshot"}
        assert shop.builder.exclusive_entries_of(template) == []
    shutil.rmtree(shop.path / "templates" / "mine")
    assert await shop.unused(FakeGvisor()) == []
    assert {entry.kind for entry in shop.builder.exclusive_entries_of(twin.template)} == {"image", "snapshot"}


async def test_the_version_covers_everything_that_machines_can_differ_in(shop: Shop):
    changes = [MINE, MINE.replace("import numpy", "import os"), MINE.replace("128", "256"), MINE + 'env.A = "1"\n']
    versions = [(await shop.build("mine", FakeJail(), text)).version for text in changes]
    assert len(set(versions)) == len(changes)
    again = await shop.build("mine", FakeJail(), MINE.replace('"T"', '"Another title"'))
    assert again.version == versions[0]
    found = await shop.builder.find(again.template, FakeJail())
    assert found is not None
    assert found.version == again.version


async def test_damage_to_a_build_is_found_and_a_new_snapshot_is_another_version(shop: Shop):
    before = await shop.build("mine", FakeGvisor())
    assert await shop.builder.damaged(before) == []
    assert before.snapshot is not None
    (before.snapshot.path / "state").write_text("{'same size'}"[:2])
    (entry,) = await shop.builder.damaged(before)
    assert entry.path == before.snapshot.path
    await shop.store.remove(entry.kind, entry.key)
    after = await shop.build("mine", FakeGvisor())
    assert after.snapshot == before.snapshot, "it is in the same place"
    assert after.version != before.version, "pools have to start machines again"


async def test_a_build_lists_the_entries_its_machines_use(shop: Shop):
    kinds = {FakeVm: {"image", "kernel", "initramfs", "snapshot"}, FakeGvisor: {"image", "agent", "snapshot"}}
    kinds[FakeJail] = {"tree", "agent"}
    for driver, expected in kinds.items():
        built = await shop.build("mine", driver())
        assert {shop.store.entry(path).kind for path in built.entries()} == expected


async def test_entries_cannot_be_removed_while_a_snapshot_is_taken_of_them(
    shop: Shop, agent: type[FakeAgent], monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    async def remove_meanwhile(_agent: FakeAgent, _warm_up: WarmUp, timeout_s: float) -> None:
        seen.extend([await shop.store.remove(entry.kind, entry.key) for entry in shop.store.entries()])

    monkeypatch.setattr(agent, "warm", remove_meanwhile)
    await shop.build("mine", FakeGvisor())
    assert sorted(seen) == ["in use", "in use", "removed"]  # image and agent; the base is no longer needed


async def test_an_image_is_usable_without_its_base(builder: Builder, workshop: Workshop, tmp_path: Path):
    await builder.build_image(template())
    store = Store(tmp_path)
    (base,) = [entry for entry in store.entries() if entry.kind == "base"]
    await store.remove("base", base.key)
    workshop.ran.clear()
    await builder.build_image(template())
    assert workshop.ran == []


@pytest.mark.parametrize(
    ("tool", "step"),
    [("mmdebstrap", "base"), ("pip", "image"), ("mkfs.erofs", "image"), ("apt-get", "kernel")],
)
async def test_a_failed_build_names_the_step_and_shows_its_log(
    builder: Builder, workshop: Workshop, tmp_path: Path, tool: str, step: str
):
    workshop.broken = tool
    driver = FakeVm()
    with pytest.raises(BuildFailed) as caught:
        await builder.build(template(), driver)
    assert caught.value.step == step
    assert f"{tool} ended with status 1" in str(caught.value)
    assert "E: out of luck" in caught.value.log_tail
    assert caught.value.log_path.is_relative_to(tmp_path / "logs")
    assert staged(tmp_path) == []
    assert await builder.find(template(), driver) is None
    workshop.broken = None
    await builder.build(template(), driver)


async def test_a_failed_warm_up_leaves_no_machine_and_no_snapshot(
    builder: Builder, agent: type[FakeAgent], tmp_path: Path
):
    agent.error = AgentTimeout("the warm-up took too long")
    driver = FakeVm()
    with pytest.raises(BuildFailed, match="the warm-up took too long") as caught:
        await builder.build(template(), driver)
    assert caught.value.step == "snapshot"
    assert driver.running == []
    assert staged(tmp_path) == []
    assert await builder.find(template(), driver) is None


async def test_a_cancelled_build_leaves_nothing_incomplete(builder: Builder, workshop: Workshop, tmp_path: Path):
    workshop.hanging = "pip"
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(builder.build, template(), FakeVm())
            await workshop.started.wait()
            assert staged(tmp_path)
            tasks.cancel_scope.cancel()
    assert staged(tmp_path) == []
    assert "image" not in {entry.kind for entry in Store(tmp_path).entries()}


async def test_two_concurrent_builds_make_everything_once(workshop: Workshop, tmp_path: Path, agent: type[FakeAgent]):
    driver = FakeVm()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                builder = Builder(Store(tmp_path), make_tools=workshop.tools)
                tasks.start_soon(builder.build, template(), driver)
    assert workshop.ran.count("mmdebstrap") == workshop.ran.count("pip") == 1
    assert driver.launched == 1


async def test_progress_names_each_step_and_what_it_does(workshop: Workshop, tmp_path: Path, agent: type[FakeAgent]):
    seen: list[Progress] = []
    await Builder(Store(tmp_path), seen.append, make_tools=workshop.tools).build(template(), FakeVm())
    done = [progress.step for progress in seen if progress.state == "done"]
    assert sorted(done) == ["base", "image", "initramfs", "kernel", "snapshot"]
    assert "I am pip" in {progress.message for progress in seen if progress.state == "running"}


async def test_what_a_driver_lacks_is_downloaded(builder: Builder):
    programs = (RUNSC, TOYCTL)  # the product knows nothing about the second one's driver
    assert [builder.find_program(program) for program in programs] == [None, None]
    for program in programs:
        await builder.fetch(program)
    assert [path and path.name for path in map(builder.find_program, programs)] == ["runsc", "toyctl"]
    assert builder.find_kernel() is None
    await builder.fetch(GUEST_KERNEL)
    assert builder.find_kernel() is not None


async def test_gvisor_is_downloaded_from_a_suite_with_a_new_one_and_kept_in_the_store(
    builder: Builder, workshop: Workshop, tmp_path: Path
):
    path = await builder.build_program(RUNSC)
    assert path.read_text() == "usr/bin/runsc"
    assert path.stat().st_mode & 0o777 == 0o755
    assert builder.find_program(RUNSC) == path
    assert workshop.ran == ["apt-get", "apt-get", "dpkg"]
    assert [word for word in workshop.argv[-2] if not word.startswith("-")][-2:] == ["download", "runsc"]
    (entry,) = Store(tmp_path).entries()
    assert (entry.inputs["suite"], entry.details) == ("trixie", {"package": "linux_6.1_amd64"})
    assert sorted(found.name for found in path.parent.iterdir()) == ["meta.json", "runsc"]


async def test_without_debian_sources_the_error_says_to_install_gvisor(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: None)
    with pytest.raises(BuildFailed, match="install runsc of July 2024 or newer on the PATH"):
        await builder.build_program(RUNSC)
    assert builder.find_program(RUNSC) is None


async def test_without_debian_sources_the_error_names_the_kernel_setting(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: None)
    with pytest.raises(BuildFailed, match="MCP_SANDBOX_GUEST_KERNEL"):
        await builder.build_kernel()


def test_an_image_has_an_account_for_user_code_and_no_traces_of_the_host(tmp_path: Path):
    _grow_tree(tmp_path)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "usr/bin/bash").write_text("")
    (tmp_path / "etc/apt/sources.list").write_text("deb http://mirror.example x main\n")
    (tmp_path / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (tmp_path / "etc/hostname").write_text("host\n")
    image.prepare_tree(tmp_path)
    assert "sandbox:x:1000:1000:Sandbox:/workspace:/bin/bash\n" in (tmp_path / "etc/passwd").read_text()
    assert (tmp_path / "etc/passwd").read_text().startswith("root:")
    assert (tmp_path / "etc/resolv.conf").readlink() == Path("/run/mcp-sandbox/resolv.conf")
    assert not (tmp_path / "etc/apt/sources.list").exists()


def test_an_image_has_mount_points_for_private_file_systems(tmp_path: Path):
    _grow_tree(tmp_path)
    image.prepare_tree(tmp_path)
    for name in ("workspace", "run", "proc", "sys", "dev"):
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o755
    for name in ("tmp", "var/tmp"):
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o1777
    for name in ("hostname", "machine-id"):
        assert str((tmp_path / "etc" / name).readlink()) == f"/run/mcp-sandbox/{name}"


def test_an_image_is_readable_for_everyone_and_has_no_set_user_id_bits(tmp_path: Path):
    modes = {"secret": (0o600, 0o644), "su": (0o4711, 0o755), "tmp": (0o1777, 0o1777), "root": (0o2700, 0o755)}
    for name, (mode, _) in modes.items():
        path = tmp_path / name
        path.mkdir() if name in ("tmp", "root") else path.write_text("")
        path.chmod(mode)
    (tmp_path / "root/link").symlink_to("/nonexistent")
    image.make_readable(tmp_path)
    for name, (_, mode) in modes.items():
        assert (tmp_path / name).stat().st_mode & 0o7777 == mode


async def test_a_missing_or_failing_tool_is_named(tmp_path: Path):
    lines: list[str] = []
    tools = LoggedTools(tmp_path / "log", lines.append)
    with pytest.raises(StepFailed, match="no-such-tool is not installed"):
        await tools.run(["no-such-tool"])
    with pytest.raises(StepFailed, match="sh ended with status 3"):
        await tools.run(["sh", "-c", "echo to stdout; echo to stderr >&2; exit 3"])
    assert lines == ["to stdout", "to stderr"]
    assert "$ sh -c" in (tmp_path / "log").read_text()


async def test_a_flood_of_output_fills_neither_memory_nor_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("templates.tools.MAX_LINES", 10)
    monkeypatch.setattr("templates.tools.MAX_LOG", 1000)
    tools = LoggedTools(tmp_path / "log", lambda line: None)
    assert await tools.run(["seq", "2000"]) == [str(number) for number in range(1991, 2001)]
    log = (tmp_path / "log").read_text()
    assert len(log) < 1100
    assert log.startswith("(earlier output is left out)")
    assert "\n2000\n(seq took " in log
