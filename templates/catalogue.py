"""The templates there are: the user's directories on a search path, then the built-in ones."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from templates.errors import InvalidTemplate, Problem, UnknownTemplate
from templates.model import Template
from templates.template_file import read_template
from vmm.errors import Untrusted
from vmm.trust import check_trusted

BUILT_IN = Path(__file__).parent
FILE_NAME = "template.toml"  # a directory with such a file is a template of that name
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_BAD_NAME = Problem("rename the directory: a template's name has up to 63 lower-case letters, digits and hyphens")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One name in the catalogue."""

    name: str
    folder: Path
    template: Template | None  # None if its template.toml has errors
    error: InvalidTemplate | None
    hides: tuple[Path, ...]  # directories of the same name further down the search path

    @property
    def built_in(self) -> bool:
        """Whether the template comes with the product."""
        return self.folder.parent == BUILT_IN


class Catalogue:
    """Templates by name. Every call looks at the files again, so a change needs no restart."""

    def __init__(self, path: Sequence[Path] = ()) -> None:
        self.path = tuple(path)
        self._roots = tuple(dict.fromkeys((*self.path, BUILT_IN)))

    def load(self, name: str) -> Template:
        """Return the template called `name`; raises UnknownTemplate or InvalidTemplate."""
        if NAME.fullmatch(name):
            for root in self._roots:
                if (found := _load(root / name / FILE_NAME)) is not None:
                    return found
        raise UnknownTemplate(name, self.names())

    def names(self) -> list[str]:
        """Return the names of all templates, including those with errors."""
        return sorted(filter(NAME.fullmatch, self._folders()))

    def templates(self) -> dict[str, Template]:
        """Return all templates without errors, by name."""
        return {entry.name: entry.template for entry in self.entries() if entry.template}

    def entries(self) -> Iterator[CatalogueEntry]:
        """Yield everything on the search path, by name."""
        for name, (folder, *hidden) in sorted(self._folders().items()):
            template, error = None, None
            try:
                if NAME.fullmatch(name):
                    template = self.load(name)
                else:
                    error = InvalidTemplate(folder, _BAD_NAME)
            except UnknownTemplate:  # removed just now
                continue
            except InvalidTemplate as invalid:
                error = invalid
            yield CatalogueEntry(name, folder, template, error, tuple(hidden))

    def _folders(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for root in self._roots:
            for file in root.glob(f"*/{FILE_NAME}"):
                found.setdefault(file.parent.name, []).append(file.parent)
        return found


def _load(file: Path) -> Template | None:
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidTemplate(file, Problem(f"cannot be read: {error.strerror}")) from None
    return _read(file, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=256)
def _read(file: Path, _stamp: tuple[int, ...]) -> Template:
    """Read a template, or return the cached one if the file has not changed. Reading takes a millisecond, too long for
    every new sandbox."""
    if not file.is_relative_to(BUILT_IN):
        try:
            check_trusted(file.parent)  # what it says is run when it is built
        except Untrusted as error:
            raise InvalidTemplate(file, Problem(str(error))) from None
    return read_template(file)
