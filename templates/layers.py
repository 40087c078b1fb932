"""From the layers of an OCI image to one tar file, in which nothing leads out of the tree it is unpacked to.

Layers come from strangers. They are put on top of each other in memory, name by name, and never on the host's disk:
a link in a layer can only lead to another name of the image. The result has only true directories above its files,
and neither devices nor rights.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from templates.tools import StepFailed

MAX_NAMES = 1_000_000  # an image with a desktop and all of TeX has half as many
MAX_BYTES = 64 * 1024**3  # a few bytes of a sparse file can claim to be any number of them
MAX_DEPTH = 256  # directories in each other: whoever walks through the tree later takes a call for each
MAX_READ = 1024 * 1024  # bytes at once: contents are read in small pieces, only a header can claim to be larger
KEPT_MODE = 0o1777  # a program with the right to become somebody else must not lie on the host
MAX_LINKS = 40  # followed for one name, as Linux does
WHITEOUT, OPAQUE = (
    ".wh.",
    ".wh..wh..opq",
)  # "the lower layers' file of this name is gone", "so is all in this directory"


@dataclass(slots=True)
class Node:
    """A file, a link or, with children, a directory. One that has two names is in the tree twice."""

    mode: int
    mtime: int
    children: dict[str, "Node"] | None = None
    target: str | None = None  # of a symbolic link
    content: tuple[tarfile.TarFile, tarfile.TarInfo] | None = None
    written_as: str | None = None


def _directory(mode: int = 0o755, mtime: int = 0) -> Node:
    return Node(mode, mtime, children={})


@dataclass(slots=True)
class Layers:
    """Layers as they lie on top of each other."""

    root: Node = field(default_factory=_directory)
    names: int = 0
    size: int = 0

    def add(self, layer: tarfile.TarFile) -> None:
        """Put a layer on top of those that are here. What it takes away are names of layers below it."""
        members = [(_parts(member.name), member) for member in self._counted(layer)]
        for parts, _ in members:
            if parts and parts[-1].startswith(WHITEOUT):
                self._take_away(parts)
        for parts, member in members:
            if parts and not parts[-1].startswith(WHITEOUT):
                self._put(parts, layer, member)

    def write(self, target: Path) -> None:
        """Write all that is left as one tar file. Machines get their devices from their own kernel."""
        with tarfile.open(target, "w:", format=tarfile.GNU_FORMAT) as tar:
            for name, node in _walk(self.root, ""):
                if name != "dev" and not name.startswith("dev/"):
                    _write(tar, name, node)

    def _counted(self, layer: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in layer:
            self.names += 1
            self.size += member.size
            if self.names > MAX_NAMES or self.size > MAX_BYTES:
                raise StepFailed(
                    f"the image is too big: more than {MAX_NAMES} files, or than {MAX_BYTES // 1024**3} GB in them"
                )
            yield member

    def _take_away(self, parts: list[str]) -> None:
        folder = self._look(parts[:-1])
        if folder is None or folder.children is None:
            return
        if parts[-1] == OPAQUE:
            folder.children.clear()
        else:
            folder.children.pop(parts[-1].removeprefix(WHITEOUT), None)

    def _put(self, parts: list[str], layer: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        mode, mtime = member.mode & KEPT_MODE, max(0, int(member.mtime))
        if member.isdir():
            node = _directory(mode, mtime)
        elif member.issym():
            node = Node(0o777, mtime, target=member.linkname)
        elif member.islnk():
            found = self._look(_parts(member.linkname))
            if found is None or found.children is not None:
                raise StepFailed(f"a layer of the image is damaged: {member.name} is a hard link to no file")
            node = found
        elif member.isreg():
            node = Node(mode, mtime, content=(layer, member))
        else:
            return  # a device, a pipe
        children = self._folder(parts[:-1])
        there = children.get(parts[-1])
        if there is not None and there.children is not None and node.children is not None:
            there.mode, there.mtime = mode, mtime  # a directory again: what is in it stays
        else:
            children[parts[-1]] = node

    def _look(self, parts: Sequence[str]) -> Node | None:
        """What a name without links in its way leads to."""
        node: Node | None = self.root
        for part in parts:
            node = node.children.get(part) if node is not None and node.children is not None else None
        return node

    def _folder(self, parts: Sequence[str]) -> dict[str, Node]:
        """The directory of this name, made where it is missing; links on the way lead to other names of the image."""
        path: list[Node] = [self.root]
        left, links = list(reversed(parts)), 0
        while left:
            part = left.pop()
            if part == "..":
                path = path[:-1] or path  # nothing is above the root
                continue
            here = path[-1].children
            assert here is not None
            node = here.get(part)
            if node is not None and node.target is not None and links < MAX_LINKS:
                links += 1
                path = [self.root] if node.target.startswith("/") else path
                left += [step for step in reversed(node.target.split("/")) if step not in ("", ".")]
                continue
            if node is None or node.children is None:
                node = here[part] = _directory()
                self.names += 1
            path.append(node)
            if len(path) > MAX_DEPTH:
                raise StepFailed(f"the image is refused: it has more than {MAX_DEPTH} directories in each other")
        found = path[-1].children
        assert found is not None
        return found


class _LayerFile(io.FileIO):
    """A layer on disk. A header that claims to be larger than memory is not read into it."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def merge_layers(layers: Sequence[Path], target: Path) -> None:
    """Put layers, lowest first, into one tar file."""
    merged = Layers()
    with ExitStack() as stack:
        try:
            for path in layers:
                # Nothing but plain tar: whoever fetched the image has unpacked it.
                file = stack.enter_context(_LayerFile(path))
                merged.add(stack.enter_context(tarfile.open(fileobj=file, mode="r:")))
            merged.write(target)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            raise StepFailed(f"a layer of the image is damaged: {error}") from None


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise StepFailed(f"a layer of the image is refused: {name!r} leads out of it")
    return parts


def _walk(folder: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    """Every name, that of a directory before those in it. Without recursion: names can be thousands deep."""
    waiting = [(prefix, folder)]
    while waiting:
        name, node = waiting.pop()
        if name:
            yield name, node
        if node.children is not None:
            waiting += [(f"{name}/{child}".lstrip("/"), node.children[child]) for child in sorted(node.children)]


def _write(tar: tarfile.TarFile, name: str, node: Node) -> None:
    """A fresh header: of a stranger's only what we know is taken over."""
    header = tarfile.TarInfo(name)
    # Whoever unpacks it may be an ordinary user, and has to get into every directory.
    header.mode, header.mtime = node.mode | (0o600 if node.children is None else 0o700), node.mtime
    data: IO[bytes] | None = None
    if node.children is not None:
        header.type = tarfile.DIRTYPE
    elif node.target is not None:
        header.type, header.linkname = tarfile.SYMTYPE, node.target
    elif node.written_as is not None:
        header.type, header.linkname = tarfile.LNKTYPE, node.written_as
    else:
        assert node.content is not None
        layer, member = node.content
        data, header.size = layer.extractfile(member), member.size
    tar.addfile(header, data)
    if node.children is None:
        node.written_as = name
