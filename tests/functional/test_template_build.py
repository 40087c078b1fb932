"""Builds with the real tools."""

import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from anyio.streams.text import TextReceiveStream

from mcp_sandbox.config import load_settings
from templates.build import Builder, Progress
from templates.debian import BASE_TAR
from templates.image import extract_tree
from templates.model import Template
from templates.store import Entry, Store
from templates.tools import LoggedTools
from templates.update import find_updates
from templates.wheels import guest_python_command
from tests.unit.fake_driver import FakeDriver
from tests.waiting import BUILD_S, HANG_S, LOOK_AGAIN_S
from vmm.drivers.gvisor import RUNSC, release
from vmm.types import Capabilities, GuestCode, Isolation

TOOLS = ("mmdebstrap", "mkfs.erofs", "fsck.erofs", "apt-get", "dpkg", "tar")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        any(shutil.which(tool, path=PATH) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"
    ),
]


def tiny(name: str, packages: list[str], *run: str) -> Template:
    return Template.model_validate(
        {
            "name": name,
            "folder": Path("/nowhere"),
            "title": "Tiny",
            "description": "Nothing but the base.",
            "language": "python",
            "source": {"debian": {"suite": "bookworm", "packages": packages, "run": list(run)}},
            "machine": {"memory_mb": 128, "disk_mb": 64},
        }
    )


class Jail(FakeDriver):
    """A driver whose machines run in a directory tree and boot no kernel."""

    capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """The session's store, without the entries that a test added for its own templates."""
    store = Store(load_settings().home)
    before = {entry.path for entry in store.entries()}
    yield store
    for entry in store.entries():
        is_layer = entry.kind == "base" and "base" in entry.inputs
        if entry.path not in before and (is_layer or entry.details.get("template", "").startswith("test-")):
            await store.remove(entry.kind, entry.key)


async def base_of(store: Store, template: Template) -> Entry:
    builder = Builder(store)
    await builder.build_image(template)
    base = store.find("base", builder.inventory.plan_image(template).base)
    assert base is not None
    return base


async def test_an_image_is_built_on_the_shared_base_and_passes_fsck(store: Store):
    steps: list[Progress] = []
    builder = Builder(store, steps.append)
    with anyio.fail_after(BUILD_S):
        image = await builder.build_image(tiny("test-image", []))
        steps.clear()
        assert await builder.build_image(tiny("test-image", [])) == image
    assert [(step.step, step.state) for step in steps] == [("image", "ready")]
    await anyio.run_process(["fsck.erofs", str(image)], env={"PATH": PATH})
    described = await anyio.run_process(["dump.erofs", "--path=/etc/hosts", str(image)], env={"PATH": PATH})
    assert b"Layout: 0 " in described.stdout, "inlined data, which gVisor cannot map"


async def test_other_users_cannot_reach_an_image_whatever_the_umask(store: Store):
    """Machines run as other users, and get it as an open file."""
    before = os.umask(0)
    try:
        with anyio.fail_after(BUILD_S):
            image = await Builder(store).build_image(tiny("test-umask", ["python3-six"]))
    finally:
        os.umask(before)
    assert image.parent.stat().st_mode & 0o077 == 0


async def test_a_tree_has_the_files_of_its_image_and_every_user_can_read_them(store: Store):
    with anyio.fail_after(BUILD_S):
        built = await Builder(store).build(tiny("test-tree", []), Jail())
    assert isinstance(built.boot, GuestCode)
    assert built.boot.archive.is_file()
    assert str((built.root / "etc/hostname").readlink()) == "/run/mcp-sandbox/hostname"
    assert (built.root / "workspace").is_dir()
    paths = [built.root, *built.root.rglob("*")]
    modes = {path.lstat().st_mode for path in paths if not path.is_symlink()}
    assert len(paths) > 1000
    assert [oct(mode) for mode in modes if mode & 0o444 != 0o444 or mode & 0o6022] == []


async def test_the_downloaded_gvisor_runs_and_is_new_enough(store: Store):
    with anyio.fail_after(BUILD_S):
        runsc = await Builder(store).build_program(RUNSC)
    assert Builder(store).find_program(RUNSC) == runsc
    with runsc.open("rb") as file:
        found = await release.ask(file.fileno())
    assert found is not None
    assert found.missing == ()


async def test_more_packages_are_installed_without_rebuilding_the_base(store: Store, tmp_path: Path):
    with anyio.fail_after(BUILD_S):
        await Builder(store).build_image(tiny("test-base", []))
        steps: list[Progress] = []
        await Builder(store, steps.append).build_image(tiny("test-packages", ["tree"]))
    assert {step.step for step in steps if step.state == "done"} == {"packages", "image"}
    layers = [entry for entry in store.entries() if entry.inputs.get("packages") == ["tree"]]
    await extract_tree(LoggedTools(tmp_path / "log", print), layers[0].path / BASE_TAR, tmp_path / "tree")
    assert (tmp_path / "tree/usr/bin/tree").is_file()


async def test_commands_see_no_secret_of_the_operator_and_no_file_of_the_host(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PIP_INDEX_URL", "hunter2")
    monkeypatch.setenv("no_proxy", "mirror.example")
    look = "env >/environment; cat /proc/[0-9]*/environ >>/environment 2>/dev/null || true"
    with anyio.fail_after(BUILD_S):
        await Builder(store).build_image(tiny("test-secret", [], look))
    (layer,) = [entry for entry in store.entries() if entry.inputs.get("run") == [look]]
    tar = (layer.path / BASE_TAR).read_bytes()
    assert b"no_proxy=mirror.example" in tar
    assert b"HOME=/root\n" in tar
    assert b"hunter2" not in tar
    assert b"SECRET_TOKEN" not in tar


async def test_the_images_python_has_its_whole_standard_library(store: Store, tmp_path: Path):
    with anyio.fail_after(BUILD_S):
        base = await base_of(store, tiny("test-python", []))
    tree = tmp_path / "tree"
    await extract_tree(LoggedTools(tmp_path / "log", print), base.path / BASE_TAR, tree)
    command, env = guest_python_command(tree)
    modules = "bz2 ctypes curses dbm decimal hashlib lzma multiprocessing readline sqlite3 ssl uuid zlib zoneinfo"
    await anyio.run_process([*command, "-c", f"import {', '.join(modules.split())}"], env={**os.environ, **env})


async def test_kernel_and_initramfs_are_made_from_debian_packages(store: Store):
    with anyio.fail_after(BUILD_S):
        kernel = await Builder(store).build_kernel()
    assert kernel.vmlinuz.read_bytes()[0x202:0x206] == b"HdrS", "the magic of a Linux boot image"
    initramfs = kernel.initramfs.read_bytes()
    for name in (b"init", b"bin/busybox", b"modules/order", b"modules/virtio_blk.ko", b"guest/agent/__main__.py"):
        assert b"\0" + name + b"\0" in initramfs or b"0" + name + b"\0" in initramfs
    assert Builder(store).find_kernel() == kernel


async def test_a_cancelled_build_leaves_no_process_and_no_file(tmp_path: Path):
    children = psutil.Process().children()
    scratch = set(Path(tempfile.gettempdir()).glob("mmdebstrap.*"))
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:

            def cancel_in_the_middle(progress: Progress) -> None:
                if progress.state == "running" and "extracting archives" in progress.message:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(Builder(Store(tmp_path), cancel_in_the_middle).build_image, tiny("test-cancel", []))
    assert tasks.cancel_scope.cancelled_caught
    assert list(tmp_path.glob("staging/*")) == []
    assert Store(tmp_path).entries() == []
    assert psutil.Process().children() == children
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(tmp_path) in command] == []
    assert set(Path(tempfile.gettempdir()).glob("mmdebstrap.*")) <= scratch


async def test_an_old_package_in_a_base_is_found_in_debians_archive(store: Store, tmp_path: Path):
    template = tiny("test-update", [])
    with anyio.fail_after(BUILD_S):
        base = await base_of(store, template)
        with old_package(base.path / BASE_TAR, "libc6", "2.36-1"):
            updates = await find_updates(
                store, Builder(store).inventory, [template], LoggedTools(tmp_path / "log", print), tmp_path
            )
    (debian,) = [update for update in updates if update.part == "Debian bookworm"]
    (libc,) = [upgrade for upgrade in debian.upgrades if upgrade.package == "libc6"]
    assert libc.old == "2.36-1"
    assert libc.new.startswith("2.36-9")


@contextmanager
def old_package(tar: Path, package: str, version: str) -> Iterator[None]:
    """Make a base claim for a while that it has an old version of a package."""
    original = tar.rename(tar.with_suffix(".original"))
    current = re.compile(rf"(Package: {package}\n(?:.+\n)*?Version: )\S+")
    with tarfile.open(original, "r:") as old, tarfile.open(tar, "w:", format=tarfile.PAX_FORMAT) as changed:
        status = next(member for member in old if member.name.endswith("dpkg/status"))
        data = old.extractfile(status)
        assert data is not None
        text = current.sub(rf"\g<1>{version}", data.read().decode()).encode()
        status.size = len(text)
        changed.addfile(status, io.BytesIO(text))
    try:
        yield
    finally:
        original.replace(tar)


BUILD_IN_THE_MIDDLE = """
import sys
import anyio
from pathlib import Path
from templates.build import Builder
from templates.store import Store
from tests.functional.test_template_build import tiny

builder = Builder(Store(Path(sys.argv[1])), lambda progress: print(progress.message, flush=True))
anyio.run(builder.build_image, tiny("test-killed", []))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's builds mount anything on the host")
async def test_a_killed_build_leaves_only_files_which_the_next_one_removes(tmp_path: Path):
    def running() -> list[str]:
        commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return [command for command in commands if str(tmp_path) in command]

    scratch = set(Path(tempfile.gettempdir()).glob("mmdebstrap.*"))
    argv = [sys.executable, "-c", BUILD_IN_THE_MIDDLE, str(tmp_path)]
    with anyio.fail_after(HANG_S):
        async with await anyio.open_process(argv, stderr=None) as process:
            assert process.stdout is not None
            async for text in TextReceiveStream(process.stdout):
                if "extracting archives" in text:
                    process.kill()
        while running():
            await anyio.sleep(LOOK_AGAIN_S)
    mounts = Path("/proc/self/mounts").read_text()
    assert str(tmp_path) not in mounts
    assert set(Path(tempfile.gettempdir()).glob("mmdebstrap.*")) <= scratch
    Store(tmp_path).sweep()
    assert list(tmp_path.glob("staging/*")) == []
