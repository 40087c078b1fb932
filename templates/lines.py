"""Where in a TOML file each field stands. Python's own reader checks a file and tells values, but no lines."""

import re
import tomllib
from collections.abc import Iterator

Field = tuple[str | int, ...]

# One piece of TOML. A string over several lines ends at the first three quotes, and two more can be its last letters.
_PIECE = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:\'{0,2})|"(?:\\.|[^"\\])*"|'[^']*'|#[^\n]*|[\[\]{}=,.\n]|'''
    r"""[ \t\r]+|[^\s\[\]{}=,.#"']+""",
    re.DOTALL,
)
_NOTHING = (" ", "\t", "\r", "#")  # how spaces and comments begin


def lines_of(text: str) -> dict[Field, int]:
    """The line of every table, key and element. `text` must be TOML that can be read."""
    return _Scanner(text).scan()


def line_of(lines: dict[Field, int], field: Field) -> int:
    """The line of a field, or of the table where it is missing."""
    known = (field[:length] for length in range(len(field), 0, -1))
    return next((lines[part] for part in known if part in lines), 1)


class _Scanner:
    """Goes through a file once. What is no key has nothing of interest but its length."""

    def __init__(self, text: str) -> None:
        self._pieces = list(_numbered(text))
        self._at = 0
        self._lines: dict[Field, int] = {}
        self._lengths: dict[Field, int] = {}  # of arrays of tables: [[name]] adds one to them

    def scan(self) -> dict[Field, int]:
        table: Field = ()
        while self._skip("\n"):
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._lines

    def _header(self) -> Field:
        line, array = self._take()[1], False
        if self._peek() == "[":
            self._take()
            array = True
        path = self._deep(self._key())
        self._take()
        if array:
            self._take()
            number = self._lengths.get(path, 0)
            self._lengths[path] = number + 1
            self._note(path, line)
            path = (*path, number)
        self._note(path, line)
        return path

    def _deep(self, key: list[str]) -> Field:
        """A header's full path: a table in an array of tables belongs to the last one there."""
        path: Field = ()
        for part in key:
            if path in self._lengths:
                path = (*path, self._lengths[path] - 1)
            path = (*path, part)
        return path

    def _pair(self, table: Field) -> None:
        line = self._pieces[self._at][1]
        path = (*table, *self._key())
        self._take()  # the "="
        self._note(path, line)
        self._value(path)

    def _key(self) -> list[str]:
        parts = [_plain(self._word())]
        while self._skip() and self._peek() == ".":
            self._take()
            parts.append(_plain(self._word()))
        return parts

    def _word(self) -> str:
        self._skip()
        return self._take()[0]

    def _value(self, path: Field) -> None:
        self._skip()
        match self._peek():
            case "[":
                self._take()
                self._elements(path)
            case "{":
                self._take()
                self._inline(path)
            case _:
                while self._at < len(self._pieces) and self._peek() not in ("\n", ",", "]", "}"):
                    self._at += 1

    def _elements(self, path: Field) -> None:
        number = 0
        while self._skip("\n") and self._peek() != "]":
            if self._peek() == ",":
                self._take()
                continue
            self._note((*path, number), self._pieces[self._at][1])
            self._value((*path, number))
            number += 1
        self._take()

    def _inline(self, path: Field) -> None:
        while self._skip("\n") and self._peek() != "}":
            if self._peek() == ",":
                self._take()
                continue
            self._pair(path)
        self._take()

    def _note(self, path: Field, line: int) -> None:
        """Where a field stands first; tables that it makes by the way stand there, too."""
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)

    def _skip(self, *also: str) -> bool:
        """Go on to the next piece that says something; False at the end."""
        while self._at < len(self._pieces) and (self._peek()[0] in _NOTHING or self._peek() in also):
            self._at += 1
        return self._at < len(self._pieces)

    def _peek(self) -> str:
        return self._pieces[self._at][0]

    def _take(self) -> tuple[str, int]:
        self._at += 1
        return self._pieces[self._at - 1]


def _numbered(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for piece in _PIECE.findall(text):
        yield piece, line
        line += piece.count("\n")


def _plain(word: str) -> str:
    """A part of a key without quotes."""
    return str(tomllib.loads(f"key = {word}")["key"]) if word[0] in "\"'" else word
