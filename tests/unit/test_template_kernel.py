"""Kernel modules in load order, the initramfs, and the agent's archive."""

import ast
import io
import lzma
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from templates.cpio import CpioArchive
from templates.errors import UnusableKernel
from templates.guest_code import agent_inputs, guest_files, pack_agent
from templates.kernel import OwnKernel, initramfs_inputs, kernel_inputs, pack_initramfs
from templates.kernel_modules import load_order


def module(directory: Path, name: str, *, depends: str = "", softdep: str = "") -> None:
    content = b"\x7fELF\0license=GPL\0" + f"depends={depends}\0".encode()
    if softdep:
        content += f"softdep=pre: {softdep}\0".encode()
    path = directory / "kernel" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)


def test_each_module_comes_after_its_dependencies(tmp_path: Path):
    module(tmp_path, "virtio_blk.ko", depends="virtio,virtio_ring")
    module(tmp_path, "virtio.ko")
    module(tmp_path, "virtio_ring.ko", depends="virtio")
    module(tmp_path, "erofs.ko.xz", depends="libcrc32c")
    module(tmp_path, "libcrc32c.ko", softdep="crc32c-intel")
    module(tmp_path, "crc32c-intel.ko")
    module(tmp_path, "unrelated.ko")
    names = [name for name, _ in load_order(tmp_path)]
    assert names == ["virtio", "virtio_ring", "virtio_blk", "crc32c_intel", "libcrc32c", "erofs"]


def test_built_in_modules_are_not_loaded(tmp_path: Path):
    module(tmp_path, "overlay.ko")
    module(tmp_path, "erofs.ko")
    (tmp_path / "modules.builtin").write_text("kernel/fs/erofs/erofs.ko\n")
    assert [name for name, _ in load_order(tmp_path)] == ["overlay"]


def test_compressed_modules_are_unpacked(tmp_path: Path):
    module(tmp_path, "overlay.ko.xz")
    assert load_order(tmp_path)[0][1].startswith(b"\x7fELF")


def test_modules_that_depend_on_each_other_do_not_hang(tmp_path: Path):
    module(tmp_path, "overlay.ko", depends="erofs")
    module(tmp_path, "erofs.ko", depends="overlay")
    assert {name for name, _ in load_order(tmp_path)} == {"overlay", "erofs"}


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio reads what we write")
def test_cpio_can_read_our_archives(tmp_path: Path):
    archive = CpioArchive()
    archive.add_file("a/b/file", b"content", executable=True)
    archive.add_link("a/link", "b/file")
    data = archive.finish()
    assert len(data) % 512 == 0
    subprocess.run(["cpio", "-idm", "--quiet"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "a/link").read_text() == "content"
    assert (tmp_path / "a/b/file").stat().st_mode & 0o777 == 0o755


def test_the_initramfs_is_reproducible(tmp_path: Path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/order").write_text("")
    (tmp_path / "busybox").write_bytes(b"busybox")
    first = pack_initramfs(tmp_path)
    assert first == pack_initramfs(tmp_path)
    assert b"guest/agent/__main__.py\0" in first
    assert first.count(b"TRAILER!!!") == 2, "our own code is an archive of its own"


def test_another_kernel_or_other_code_gives_another_initramfs(monkeypatch: pytest.MonkeyPatch):
    before = initramfs_inputs("one")
    assert initramfs_inputs("two") != before
    monkeypatch.setattr("templates.kernel.guest_files", lambda: {"guest/agent.py": b"other"})
    assert initramfs_inputs("one") != before


def test_the_agents_archive_is_reproducible_and_readable_for_every_user(tmp_path: Path):
    packed = pack_agent()
    assert packed == pack_agent()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = tar.getmembers()
        tar.extractall(tmp_path, filter="data")
    assert {member.name for member in members if member.isfile()} == guest_files().keys()
    assert {(member.isdir(), member.mode, member.uid, member.mtime) for member in members} == {
        (True, 0o755, 0, 0),
        (False, 0o644, 0, 0),
    }
    agent = tmp_path / "guest/agent/__main__.py"
    assert agent.read_bytes() == guest_files()["guest/agent/__main__.py"]


def test_other_code_gives_another_archive(monkeypatch: pytest.MonkeyPatch):
    before = agent_inputs()
    assert agent_inputs() == before
    monkeypatch.setattr("templates.guest_code.guest_files", lambda: {"guest/agent.py": b"other"})
    assert agent_inputs() != before


def test_guest_code_in_machines_needs_nothing_from_the_host():
    files = guest_files()
    assert "guest/agent/__main__.py" in files
    assert not any(name.startswith("guest/client/") for name in files)
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)) if name.endswith(".py") else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("guest"):
                base = node.module.replace(".", "/")
                for alias in node.names:
                    candidates = {f"{base}.py", f"{base}/__init__.py", f"{base}/{alias.name}.py"}
                    assert candidates & files.keys(), f"{name} imports {node.module}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported = ast.unparse(node)
                assert "anyio" not in imported, f"{name}: {imported}"


def test_a_custom_kernel_counts_by_its_content(tmp_path: Path):
    vmlinuz = tmp_path / "vmlinuz"
    vmlinuz.write_bytes(b"one")
    first = kernel_inputs(OwnKernel(vmlinuz))
    vmlinuz.write_bytes(b"two")
    assert kernel_inputs(OwnKernel(vmlinuz)) != first != kernel_inputs(None)


def test_a_missing_custom_kernel_is_named_with_its_setting(tmp_path: Path):
    with pytest.raises(UnusableKernel, match="MCP_SANDBOX_GUEST_KERNEL"):
        kernel_inputs(OwnKernel(tmp_path / "nothing"))
