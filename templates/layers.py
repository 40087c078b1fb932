"""Merge the layers of an OCI image into one tar file that is safe to unpack.

Layers are untrusted. They are merged in memory, name by name, and never unpacked on the host's disk one by one: so a
link in a layer can only point to another name in the image. In the result all parents are real directories, and there
are no devices, set-user-id bits or capabilities.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from templates.disk import require_free
from templates.tools import StepFailed

MAX_NAMES = 1_000_000  # an image with a desktop and all of TeX has half as many
MAX_DEPTH = 256  # nested directories: code that later walks the tree recurses once for each
MAX_READ = 1024 * 1024  # bytes: contents are read in small chunks, so only a malicious header asks for more
# Bytes of headers, which are kept in memory: for each member, and once more for each layer, for maps of sparse files.
MEMBER_HEADERS, MORE_HEADERS = 4096, 64 * 1024**2
KEPT_MODE = 0o1777  # without set-user-id and set-group-id
MAX_LINKS = 40  # followed for one name, as in Linux
WHITEOUT = ".wh."  # prefix: the lower layers' file of this name is removed
OPAQUE = ".wh..wh..opq"  # all lower layers' files in this directory are removed


@dataclass(slots=True)
class Node:
    """A file, a symbolic link or, with children, a directory. A hard-linked file is in the tree twice."""

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
    """The merged contents of layers."""

    max_bytes: int  # of all files; a few bytes of a sparse file can claim any size
    root: Node = field(default_factory=_directory)
    names: int = 0
    size: int = 0

    def add(self, file: "LayerFile", layer: tarfile.TarFile) -> None:
        """Add a layer on top. Its whiteouts apply to the layers below it, not to itself."""
        members = [(_parts(member.name), member) for member in self._counted(file, layer)]
        file.headers_left = None
        for parts, _ in members:
            if parts and parts[-1].startswith(WHITEOUT):
                self._whiteout(parts)
        for parts, member in members:
            if parts and not parts[-1].startswith(WHITEOUT):
                self._put(parts, layer, member)

    def write(self, target: Path) -> None:
        """Write the result as one tar file, without /dev: the guest kernel creates its devices."""
        with tarfile.open(target, "w:", format=tarfile.GNU_FORMAT) as tar:
            for name, node in _walk(self.root, ""):
                if name != "dev" and not name.startswith("dev/"):
                    _write(tar, name, node)

    def _counted(self, file: "LayerFile", layer: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in layer:
            assert file.headers_left is not None
            file.headers_left += MEMBER_HEADERS
            self.names += 1
            self.size += member.size
            if self.names > MAX_NAMES or self.size > self.max_bytes:
                most = f"{MAX_NAMES} files or {self.max_bytes / 1024**3:.1f} GB"
                raise StepFailed(f"the image is too large: more than {most}")
            yield member

    def _whiteout(self, parts: list[str]) -> None:
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
                raise StepFailed(f"a layer of the image is damaged: {member.name} is a hard link to a missing file")
            node = found
        elif member.isreg():
            node = Node(mode, mtime, content=(layer, member))
        else:
            return  # a device, a pipe
        children = self._folder(parts[:-1])
        there = children.get(parts[-1])
        if there is not None and there.children is not None and node.children is not None:
            there.mode, there.mtime = mode, mtime  # the directory exists already: its contents stay
        else:
            children[parts[-1]] = node

    def _look(self, parts: Sequence[str]) -> Node | None:
        """Return the node of a name, without following links."""
        node: Node | None = self.root
        for part in parts:
            node = node.children.get(part) if node is not None and node.children is not None else None
        return node

    def _folder(self, parts: Sequence[str]) -> dict[str, Node]:
        """Return the contents of a directory, following links inside the image and creating missing directories."""
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
                raise StepFailed(f"the image is refused: directories are nested more than {MAX_DEPTH} levels deep")
        found = path[-1].children
        assert found is not None
        return found


class LayerFile(io.FileIO):
    """A layer on disk. It refuses to read headers of a huge size."""

    headers_left: int | None = MORE_HEADERS  # bytes; None once all headers are read

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        if self.headers_left is not None:
            self.headers_left -= size
            if self.headers_left < 0:
                raise tarfile.ReadError("its headers are larger than any image needs")
        return super().read(size)


def merge_layers(layers: Sequence[Path], target: Path, max_bytes: int) -> None:
    """Merge layers, lowest first, into one tar file of at most about `max_bytes`."""
    merged = Layers(max_bytes)
    with ExitStack() as stack:
        try:
            for path in layers:
                # Uncompressed tar only: skopeo has decompressed it.
                file = stack.enter_context(LayerFile(path))
                merged.add(file, stack.enter_context(tarfile.open(fileobj=file, mode="r:")))
            require_free(target.parent, merged.size, "the merged image")
            merged.write(target)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            raise StepFailed(f"a layer of the image is damaged: {error}") from None


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise StepFailed(f"a layer of the image is refused: {name!r} leads outside of it")
    return parts


def _walk(folder: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    """Yield every name, parents first. No recursion: directories can be nested deeply."""
    pending = [(prefix, folder)]
    while pending:
        name, node = pending.pop()
        if name:
            yield name, node
        if node.children is not None:
            pending += [(f"{name}/{child}".lstrip("/"), node.children[child]) for child in sorted(node.children)]


def _write(tar: tarfile.TarFile, name: str, node: Node) -> None:
    """Write a node with a new header that takes over only known fields of the untrusted one."""
    header = tarfile.TarInfo(name)
    # An ordinary user may unpack it and needs access to every directory.
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
