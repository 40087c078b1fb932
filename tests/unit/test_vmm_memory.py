"""Anonymous files for memory and disks: their content, holes and seals."""

import mmap
import os

import pytest

from vmm import memory

MB = 1 << 20


def allocated(file: int) -> int:
    return os.fstat(file).st_blocks * 512


@pytest.fixture
def sparse(tmp_path):
    """A 16 MB file with 4 KB of data in the middle and 4 KB of zeros that are no hole."""
    file = tmp_path / "sparse"
    with file.open("wb") as out:
        out.truncate(16 * MB)
        out.seek(8 * MB)
        out.write(b"x" * 4096 + bytes(4096))
    return file


def test_loaded_memory_has_the_content_of_its_file_and_no_holes(sparse):
    """A machine that writes to a hole would pay twice: for the page of the file and for its own copy."""
    loaded = memory.load_sealed(sparse, 16 * MB)
    try:
        assert os.pread(loaded, 16 * MB, 0) == sparse.read_bytes()
        assert allocated(loaded) == 16 * MB
    finally:
        os.close(loaded)


def test_sealed_memory_cannot_be_changed_and_can_be_mapped_privately(sparse):
    loaded = memory.load_sealed(sparse, 16 * MB)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(loaded, b"poison", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(loaded, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(loaded, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE | mmap.PROT_READ)
        with mmap.mmap(loaded, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_WRITE | mmap.PROT_READ) as private:
            private[:6] = b"my own"
        assert os.pread(loaded, 6, 0) == bytes(6)
    finally:
        os.close(loaded)


def test_saving_writes_no_pages_of_zeros(tmp_path):
    source = memory.new_memory(4 * MB)
    try:
        os.pwrite(source, bytes(2 * MB), 0)
        os.pwrite(source, b"data", 3 * MB)
        saved = tmp_path / "saved"
        memory.save_sparse(source, saved, 4 * MB)
        assert saved.read_bytes() == os.pread(source, 4 * MB, 0)
        with saved.open("rb") as file:
            assert allocated(file.fileno()) < 64 * 1024
    finally:
        os.close(source)


def test_what_a_monitor_adds_to_its_memory_while_it_is_saved_is_left_out(tmp_path):
    source = memory.new_memory(4 * MB)
    try:
        os.pwrite(source, b"data", 4 * MB)
        memory.save_sparse(source, tmp_path / "saved", 2 * MB)
        os.ftruncate(source, MB)
        memory.save_sparse(source, tmp_path / "shorter", 2 * MB)
    finally:
        os.close(source)
    assert [(tmp_path / name).stat().st_size for name in ("saved", "shorter")] == [2 * MB] * 2


def test_memory_of_another_size_is_not_loaded(sparse):
    with pytest.raises(OSError, match=f"memory of {16 * MB} bytes, not {8 * MB}"):
        memory.load_sealed(sparse, 8 * MB)


def test_a_scratch_copy_has_no_name_and_the_same_content(sparse, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    copy = memory.scratch_copy(sparse, directory)
    try:
        assert list(directory.iterdir()) == []
        assert os.pread(copy, 16 * MB, 0) == sparse.read_bytes()
        assert allocated(copy) < MB
    finally:
        os.close(copy)


def test_a_missing_file_leaks_no_descriptor(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        memory.load_sealed(tmp_path / "absent", MB)
    assert os.listdir("/proc/self/fd") == before


async def test_memory_is_loaded_once_unless_its_file_changes(sparse):
    sealed = memory.SealedMemory()
    try:
        first = await sealed.get(sparse, 16 * MB)
        assert await sealed.get(sparse, 16 * MB) == first
        other = sparse.with_name("other")
        other.write_bytes(b"made anew at the same place")
        other.replace(sparse)
        assert os.pread(await sealed.get(sparse, 27), 100, 0) == b"made anew at the same place"
    finally:
        sealed.close()


async def test_memory_of_a_removed_snapshot_is_freed_by_a_sweep(sparse):
    sealed = memory.SealedMemory()
    descriptors = len(os.listdir("/proc/self/fd"))
    await sealed.get(sparse, 16 * MB)
    await sealed.sweep()
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    sparse.unlink()
    await sealed.sweep()
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_memory_whose_snapshot_is_removed_while_it_is_loaded_can_be_used(sparse, monkeypatch):
    sealed = memory.SealedMemory()
    close = memory._close_in_thread

    async def close_later(files):
        await close(files)
        sparse.unlink(missing_ok=True)
        await close(sealed._forget(lambda path: not path.exists()))  # another machine has ended meanwhile

    monkeypatch.setattr(memory, "_close_in_thread", close_later)
    try:
        assert os.pread(await sealed.get(sparse, 16 * MB), 1, 0) == b"\0"
    finally:
        sealed.close()


async def test_memory_of_a_removed_snapshot_is_freed_when_another_is_loaded(sparse, tmp_path):
    sealed = memory.SealedMemory()
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        await sealed.get(sparse, 16 * MB)
        other = tmp_path / "other"
        other.write_bytes(b"x")
        sparse.unlink()
        await sealed.get(other, 1)
        assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    finally:
        sealed.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
