"""All templates there are: the user's own directories on a search path, then the ones we ship."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from templates.errors import InvalidTemplate, UnknownTemplate
from templates.model import Template
from templates.reading import read_template

BUILT_IN = Path(__file__).parent
FILE_NAME = "template.toml"  # every directory with one is a template of that name
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_RENAME = "rename it: a template's name has up to 63 lower-case letters, digits and hyphens"


@dataclass(frozen=True, slots=True)
class Listed:
    """One name of the catalogue."""

    name: str
    folder: Path
    template: Template | None  # None: its file cannot be used
    problem: str | None  # why not, a line for each thing to mend
    hides: tuple[Path, ...]  # directories further down the path that have a template of the same name

    @property
    def built_in(self) -> bool:
        """Whether it came with the product."""
        return self.folder.parent == BUILT_IN


class Catalogue:
    """Templates by name. Files are looked at again each time, so that nobody has to restart anything after a change."""

    def __init__(self, path: Sequence[Path] = ()) -> None:
        self.path = tuple(path)
        self._roots = tuple(dict.fromkeys((*self.path, BUILT_IN)))

    def load(self, name: str) -> Template:
        """The template called `name`; raises UnknownTemplate or InvalidTemplate."""
        if NAME.fullmatch(name):
            for root in self._roots:
                if (found := _load(root / name / FILE_NAME)) is not None:
                    return found
        known = ", ".join(self.names()) or "none"
        raise UnknownTemplate(f"there is no template called {name!r}; there are: {known}")

    def names(self) -> list[str]:
        """What templates are called, those that cannot be used included."""
        return sorted(filter(NAME.fullmatch, self._folders()))

    def templates(self) -> dict[str, Template]:
        """All that can be used, by name. One that cannot takes nobody else down."""
        return {entry.name: entry.template for entry in self.entries() if entry.template}

    def entries(self) -> Iterator[Listed]:
        """Everything there is to say about what is on the path, by name."""
        for name, (folder, *hidden) in sorted(self._folders().items()):
            template, problem = None, None if NAME.fullmatch(name) else f"{folder}: {_RENAME}"
            try:
                template = None if problem else self.load(name)
            except UnknownTemplate:  # removed just now
                continue
            except InvalidTemplate as error:
                problem = str(error)
            yield Listed(name, folder, template, problem, tuple(hidden))

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
        raise InvalidTemplate(f"{file}: cannot be read: {error.strerror}") from None
    return _read(file, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=256)
def _read(file: Path, _making: tuple[int, ...]) -> Template:
    """A template as its file says now. Reading it takes a millisecond, which every new sandbox would feel."""
    return read_template(file)
