"""A machine's memory and disk as anonymous files: nothing to leak, nothing to name, passed on as descriptors."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread

PAGE = 4096
CHUNK = 4 * 1024 * 1024
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_memory(size: int) -> int:
    """A descriptor of `size` bytes of fresh memory that several processes can map."""
    memory = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    return memory


def load_sealed(file: Path) -> int:
    """The content of `file` as memory that nobody can change any more, not even through a writable descriptor.

    Machines map it privately. A monitor that a guest has taken over could write to a plain file that all
    machines of a template start from; it cannot write to this one.
    """
    with file.open("rb") as source:
        memory = new_memory(os.fstat(source.fileno()).st_size)
        try:
            copy_data(source.fileno(), memory)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(memory)
            raise
    return memory


def sealed_bytes(content: bytes) -> int:
    """A descriptor of `content`, to be read from its start, that nobody can change any more."""
    memory = os.memfd_create("content", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memory, content)
    os.lseek(memory, 0, os.SEEK_SET)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
    return memory


class SealedMemory:
    """The snapshots' memory that is in use, loaded once each."""

    def __init__(self) -> None:
        self._loading = anyio.Lock()
        self._loaded: dict[Path, tuple[tuple[int, int], int]] = {}  # which file it was, and its content

    async def get(self, file: Path) -> int:
        """A descriptor of the sealed content of `file`, valid until `close` or until the file is another one."""
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
        """Give back what was loaded from files that are gone: nobody will ask for it again."""
        self._forget(lambda path: not path.exists())

    def close(self) -> None:
        """Give all of it back. Machines that map it keep their mapping."""
        self._forget(lambda path: True)

    def _forget(self, which: Callable[[Path], bool]) -> None:
        for path in list(filter(which, self._loaded)):
            os.close(self._loaded.pop(path)[1])


def save_sparse(source: int, file: Path) -> None:
    """Write memory to `file`, leaving holes where whole pages are zero."""
    zeros = bytes(PAGE)
    with file.open("xb") as target:
        target.truncate(os.fstat(source).st_size)
        for start, end in data_extents(source):
            for at in range(start, end, CHUNK):
                chunk = os.pread(source, min(CHUNK, end - at), at)
                for offset in range(0, len(chunk), PAGE):
                    page = chunk[offset : offset + PAGE]
                    if page != zeros:
                        os.pwrite(target.fileno(), page, at + offset)
        os.fsync(target.fileno())


def scratch_file(directory: Path, size: int) -> int:
    """A descriptor of an empty file in `directory` that has no name and ends with its last user."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.ftruncate(file.fileno(), size)
        return os.dup(file.fileno())


def scratch_copy(file: Path, directory: Path) -> int:
    """A nameless copy of a sparse file, as sparse as it was."""
    with file.open("rb") as source:
        copy = scratch_file(directory, os.fstat(source.fileno()).st_size)
        try:
            copy_data(source.fileno(), copy)
        except BaseException:
            os.close(copy)
            raise
    return copy


def copy_data(source: int, target: int) -> None:
    """Copy what is not a hole, inside the kernel."""
    for start, end in data_extents(source):
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            copied = os.sendfile(target, source, at, end - at)
            if copied == 0:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            at += copied


def data_extents(file: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are not holes."""
    size, at = os.fstat(file).st_size, 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes from here on
                return
            raise
        at = os.lseek(file, start, os.SEEK_HOLE)
        yield start, at
