"""Anonymous files for a machine's memory and disk: they have no name that could leak, and are passed as descriptors."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
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


def load_sealed(file: Path) -> int:
    """Return the content of `file` as sealed memory, which even a writable descriptor cannot change.

    Machines map it privately. A guest that has taken over its monitor could change a plain file, and with it every
    later machine of the template.
    """
    with trusted(file) as source:
        memory = new_memory(os.fstat(source).st_size)
        try:
            copy_data(source, memory)
            # No holes: a machine that writes to one would pay for the page of the file and for its own copy of it.
            os.posix_fallocate(memory, 0, os.fstat(memory).st_size)
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

    async def get(self, file: Path) -> int:
        """Return a descriptor of the sealed content of `file`, valid until `close` or until the file changes."""
        async with self._loading:
            status = file.stat()
            identity = (status.st_ino, status.st_mtime_ns)
            known = self._loaded.get(file)
            if known is None or known[0] != identity:
                memory = await anyio.to_thread.run_sync(load_sealed, file)
                self._forget(lambda path: path == file or not path.exists())
                self._loaded[file] = (identity, memory)
            return self._loaded[file][1]

    def sweep(self) -> None:
        """Free what was loaded from files that no longer exist."""
        self._forget(lambda path: not path.exists())

    def close(self) -> None:
        """Free everything. Machines keep their mappings."""
        self._forget(lambda path: True)

    def _forget(self, which: Callable[[Path], bool]) -> None:
        for path in list(filter(which, self._loaded)):
            os.close(self._loaded.pop(path)[1])


def save_sparse(source: int, file: Path) -> None:
    """Write memory to `file`, with holes for pages that are all zero."""
    with file.open("xb") as target:
        copy_pages(source, target.fileno())
        os.fsync(target.fileno())


def copy_pages(source: int, target: int) -> None:
    """Copy memory to an empty file, all but pages that are zero."""
    zeros = bytes(PAGE)
    os.ftruncate(target, os.fstat(source).st_size)
    for start, end in data_extents(source):
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
    for start, end in data_extents(source):
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            copied = os.sendfile(target, source, at, end - at)
            if copied == 0:
                raise OSError(errno.EIO, "the file shrank while it was copied")
            at += copied


def data_extents(file: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of every part of a file that is not a hole."""
    size, at = os.fstat(file).st_size, 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        at = os.lseek(file, start, os.SEEK_HOLE)
        yield start, at
