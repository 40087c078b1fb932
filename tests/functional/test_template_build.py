"""Builds with the real tools. What is expensive is kept in the user's own home, as the product does."""

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import platformdirs
import psutil
import pytest
from anyio.streams.text import TextReceiveStream

from templates.build import Builder, Progress
from templates.debian import BASE_TAR, base_inputs
from templates.image import extract_tree
from templates.model import Template
from templates.store import Store
from templates.tools import LoggedTools
from templates.wheels import guest_python_command
from tests.unit.fake_driver import FakeDriver
from tests.waiting import BUILD_S, HANG_S, LOOK_AGAIN_S
from vmm.drivers.gvisor.probe import OLDEST, release_in
from vmm.types import Capabilities, GuestCode, Isolation

TOOLS = ("mmdebstrap", "mkfs.erofs", "fsck.erofs", "apt-get", "dpkg", "tar")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        any(shutil.which(tool, path=PATH) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"
    ),
]


def tiny(name: str, packages: list[str]) -> Template:
    return Template.model_validate(
        {
            "name": name,
            "folder": Path("/nowhere"),
            "title": "Tiny",
            "description": "Nothing but the base.",
            "language": "python",
            "source": {"debian": {"suite": "bookworm", "packages": packages}},
            "machine": {"memory_mb": 128, "disk_mb": 64},
        }
    )


class Jail(FakeDriver):
    """A driver whose machines live in a directory and boot no kernel."""

    capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """The user's own store; entries that a test adds for itself are removed again, shared ones stay."""
    home = os.environ.get("MCP_SANDBOX_HOME")
    store = Store(Path(home) if home else platformdirs.user_data_path("mcp-sandbox"))
    before = {entry.path for entry in store.entries()}
    yield store
    for entry in store.entries():
        is_layer = entry.kind == "base" and "base" in entry.inputs
        if entry.path not in before and (is_layer or entry.details.get("template", "").startswith("test-")):
            await store.remove(entry.kind, entry.key)


async def test_an_image_is_built_on_the_shared_base_and_is_sound(store: Store):
    steps: list[Progress] = []
    builder = Builder(store, steps.append)
    with anyio.fail_after(BUILD_S):
        image = await builder.build_image(tiny("test-image", []))
        steps.clear()
        assert await builder.build_image(tiny("test-image", [])) == image
    assert [(step.step, step.state) for step in steps] == [("image", "ready")]
    await anyio.run_process(["fsck.erofs", str(image)], env={"PATH": PATH})
    described = await anyio.run_process(["dump.erofs", "--path=/etc/hosts", str(image)], env={"PATH": PATH})
    assert b"Layout: 0 " in described.stdout, "its end lies among the inodes, where gVisor cannot map it"


async def test_machines_of_any_user_can_read_an_image_that_was_built_under_a_strict_umask(store: Store):
    before = os.umask(0o077)
    try:
        with anyio.fail_after(BUILD_S):
            image = await Builder(store).build_image(tiny("test-umask", ["python3-six"]))
    finally:
        os.umask(before)
    assert image.stat().st_mode & 0o777 == 0o644
    assert image.parent.stat().st_mode & 0o005 == 0o005


async def test_a_tree_has_the_files_of_its_image_for_every_user_to_read(store: Store):
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


async def test_a_fetched_gvisor_runs_and_is_new_enough(store: Store):
    with anyio.fail_after(BUILD_S):
        runsc = await Builder(store).build_runsc()
    assert Builder(store).find_runsc() == runsc
    said = await anyio.run_process([str(runsc), "--version"])
    assert release_in(said.stdout.decode()) >= OLDEST


async def test_further_packages_are_installed_without_making_the_base_again(store: Store, tmp_path: Path):
    with anyio.fail_after(BUILD_S):
        await Builder(store).build_image(tiny("test-base", []))
        steps: list[Progress] = []
        await Builder(store, steps.append).build_image(tiny("test-packages", ["tree"]))
    assert {step.step for step in steps if step.state == "done"} == {"packages", "image"}
    layers = [entry for entry in store.entries() if entry.inputs.get("packages") == ["tree"]]
    await extract_tree(LoggedTools(tmp_path / "log", print), layers[0].path / BASE_TAR, tmp_path / "tree")
    assert (tmp_path / "tree/usr/bin/tree").is_file()


async def test_the_machines_python_has_its_whole_standard_library(store: Store, tmp_path: Path):
    with anyio.fail_after(BUILD_S):
        await Builder(store).build_image(tiny("test-python", []))
    base = store.find("base", base_inputs("bookworm"))
    assert base is not None
    tree = tmp_path / "tree"
    await extract_tree(LoggedTools(tmp_path / "log", print), base.path / BASE_TAR, tree)
    command, env = guest_python_command(tree)
    modules = "bz2 ctypes curses dbm decimal hashlib lzma multiprocessing readline sqlite3 ssl uuid zlib zoneinfo"
    await anyio.run_process([*command, "-c", f"import {', '.join(modules.split())}"], env={**os.environ, **env})


async def test_kernel_and_initramfs_are_made_from_debian_packages(store: Store):
    with anyio.fail_after(BUILD_S):
        kernel = await Builder(store).build_kernel()
    assert kernel.vmlinuz.read_bytes()[0x202:0x206] == b"HdrS", "the mark of a Linux boot image"
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
async def test_of_a_build_that_was_killed_the_next_one_finds_nothing_but_files_to_remove(tmp_path: Path):
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
