"""Write cpio archives (format "newc"), which the Linux kernel unpacks as its initramfs.

The cpio tool would not do: here the output is reproducible, and an ordinary user can add device nodes and files owned
by root.
"""

import stat
from dataclasses import dataclass, field

_MAGIC = b"070701"
_BLOCK = 512  # archives are padded to whole blocks so that another can follow


@dataclass(slots=True)
class CpioArchive:
    """An archive in memory. All files belong to root and have no modification time."""

    _data: bytearray = field(default_factory=bytearray)
    _inode: int = 0
    _directories: set[str] = field(default_factory=set)

    def add_directory(self, path: str) -> None:
        """Add a directory and its parents."""
        parent, _, _ = path.rpartition("/")
        if parent:
            self.add_directory(parent)
        if path not in self._directories:
            self._directories.add(path)
            self._add(path, stat.S_IFDIR | 0o755)

    def add_file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        self._add_parents(path)
        self._add(path, stat.S_IFREG | (0o755 if executable else 0o644), content)

    def add_link(self, path: str, target: str) -> None:
        self._add_parents(path)
        self._add(path, stat.S_IFLNK | 0o777, target.encode())

    def add_character_device(self, path: str, major: int, minor: int) -> None:
        self._add_parents(path)
        self._add(path, stat.S_IFCHR | 0o600, device=(major, minor))

    def finish(self) -> bytes:
        """Finish the archive and return it."""
        self._add("TRAILER!!!", 0)
        self._pad(_BLOCK)
        return bytes(self._data)

    def _add_parents(self, path: str) -> None:
        parent, _, _ = path.rpartition("/")
        if parent:
            self.add_directory(parent)

    def _add(self, path: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        name = path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        # inode, mode, uid, gid, links, mtime, size, device, node's device, name length, checksum
        numbers = (self._inode, mode, 0, 0, links, 0, len(content), 0, 0, *device, len(name), 0)
        self._data += _MAGIC + b"".join(b"%08X" % number for number in numbers) + name
        self._pad(4)
        self._data += content
        self._pad(4)

    def _pad(self, alignment: int) -> None:
        self._data += bytes(-len(self._data) % alignment)
