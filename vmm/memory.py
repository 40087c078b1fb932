"""Anonymous files for a machine's memory and disk: they have no name that could leak, and are passed as descriptors."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread

from vmm.process import run_tool
from vmm.trust import trusted

PAGE = 4096
CHUNK = 4 * 1024 * 1024
# No journal: the disk of a crashed machine is thrown away. Nothing is discarded or zeroed: the file is one hole.
MAKE_FILE_SYSTEM = (
    *("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal"),
    *("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"),
)
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_memory(size: int) -> int:
    """Return a descriptor of `size` bytes of new memory that several processes can map."""
    memory = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    return memory


def load_sealed(file: Path, size: int) -> int:
    """Return the content of `file` as sealed memory of `size` bytes, which even a writable descriptor cannot change.

    Machines map it privately. A guest that has taken over its monitor could change a plain file, and with it every
    later machine of the template.
    """
    with trusted(file) as source:
        if (found := os.fstat(source).st_size) != size:
            raise OSError(errno.EINVAL, f"memory of {found} bytes, not {size}", str(file))
        memory = new_memory(size)
        try:
            copy_data(source, memory)
            # No holes: a machine that writes to one would pay for the page of the file and for its own copy of it.
            os.posix_fallocate(memory, 0, size)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(memory)
            raise
    return memory


def sealed_bytes(content: bytes) -> int:
    """Return a descriptor of `content` as a sealed file, positioned at its start."""
    memory = os.memfd_create("content", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memory, content)
    os.lseek(memory, 0, os.SEEK_SET)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
    return memory


class SealedMemory:
    """Memory of snapshots, each loaded once."""

    def __init__(self) -> None:
        self._loading = anyio.Lock()
        self._loaded: dict[Path, tuple[tuple[int, int], int]] = {}  # inode and mtime of the file, and its content

    async def get(self, file: Path, size: int) -> int:
        """Return a descriptor of the sealed content of `file`, valid until `close` or until the file changes.

        Raises:
            OSError: it cannot be read, does not have `size` bytes, or there is no memory for it.
        """
        async with self._loading:
            status = file.stat()
            identity = (status.st_ino, status.st_mtime_ns)
            known = self._loaded.get(file)
            if known is None or known[0] != identity:
                memory = await anyio.to_thread.run_sync(load_sealed, file, size)
                await _close_in_thread(self._forget(lambda path: path == file or not path.exists()))
                self._loaded[file] = (identity, memory)  # last: while we wait, `sweep` may find that the file is gone
            return self._loaded[file][1]

    async def sweep(self) -> None:
        """Free what was loaded from files that no longer exist."""
        await _close_in_thread(self._forget(lambda path: not path.exists()))

    def close(self) -> None:
        """Free everything. Machines keep their mappings."""
        for memory in self._forget(lambda path: True):
            os.close(memory)

    def _forget(self, which: Callable[[Path], bool]) -> list[int]:
        return [self._loaded.pop(path)[1] for path in list(filter(which, self._loaded))]


async def _close_in_thread(files: Sequence[int]) -> None:
    """Close files that only we have, whatever happens meanwhile. Freeing a gigabyte takes 0.2 s."""
    with anyio.CancelScope(shield=True):
        for file in files:
            await anyio.to_thread.run_sync(os.close, file)


def save_sparse(source: int, file: Path, size: int) -> None:
    """Write `size` bytes of memory to `file`, with holes for pages that are all zero."""
    with file.open("xb") as target:
        copy_pages(source, target.fileno(), size)
        os.fsync(target.fileno())


def copy_pages(source: int, target: int, size: int) -> None:
    """Copy `size` bytes to an empty file, all but pages of zeros. A monitor may change the source's size meanwhile."""
    zeros = bytes(PAGE)
    os.ftruncate(target, size)
    for start, end in data_extents(source, size):
        for at in range(start, end, CHUNK):
            chunk = os.pread(source, min(CHUNK, end - at), at)
            for offset in range(0, len(chunk), PAGE):
                page = chunk[offset : offset + PAGE]
                if page != zeros:
                    os.pwrite(target, page, at + offset)


def scratch_file(directory: Path, size: int) -> int:
    """Return a descriptor of an unnamed file of `size` bytes in `directory`."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.ftruncate(file.fileno(), size)
        return os.dup(file.fileno())


async def new_disk(directory: Path, size: int) -> int:
    """Return a descriptor of an unnamed file in `directory` with an empty file system."""
    disk = scratch_file(directory, size)
    try:
        await run_tool([*MAKE_FILE_SYSTEM, f"/proc/self/fd/{disk}"], pass_fds=[disk])
    except BaseException:
        os.close(disk)
        raise
    return disk


def owned(stack: AsyncExitStack, file: int) -> int:
    """Return a descriptor that `stack` closes."""
    stack.callback(os.close, file)
    return file


def owned_space(stack: AsyncExitStack, file: int) -> int:
    """Return a descriptor of memory or a disk that a thread closes at the end of `stack`."""
    stack.push_async_callback(_close_in_thread, [file])
    return file


def scratch_copy(file: Path, directory: Path) -> int:
    """Return a descriptor of an unnamed, equally sparse copy of `file`."""
    with trusted(file) as source:
        copy = scratch_file(directory, os.fstat(source).st_size)
        try:
            copy_data(source, copy)
        except BaseException:
            os.close(copy)
            raise
    return copy


def copy_data(source: int, target: int) -> None:
    """Copy everything but holes, inside the kernel."""
    for start, end in data_extents(source, os.fstat(source).st_size):
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            copied = os.sendfile(target, source, at, end - at)
            if copied == 0:
                raise OSError(errno.EIO, "the file shrank while it was copied")
            at += copied


def data_extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of every part of the first `size` bytes of a file that is not a hole."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        if start >= size:
            return
        at = os.lseek(file, start, os.SEEK_HOLE)
        yield start, min(at, size)
