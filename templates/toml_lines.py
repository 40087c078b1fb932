"""Find the line of each field in a TOML file. `tomllib` parses and validates but does not report positions."""

import re
import tomllib
from collections.abc import Iterator

Field = tuple[str | int, ...]

# One token of TOML. A multi-line string ends at the first three quotes; up to two more quotes belong to its text.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:\'{0,2})|"(?:\\.|[^"\\])*"|'[^']*'|#[^\n]*|[\[\]{}=,.\n]|'''
    r"""[ \t\r]+|[^\s\[\]{}=,.#"']+""",
    re.DOTALL,
)
_BLANK = (" ", "\t", "\r", "#")  # first characters of whitespace and comments


def lines_of(text: str) -> dict[Field, int]:
    """Return the line of every table, key and array element. `text` must be valid TOML."""
    return _Scanner(text).scan()


def line_of(lines: dict[Field, int], field: Field) -> int:
    """Return the line of a field or, if it is missing, of its table."""
    known = (field[:length] for length in range(len(field), 0, -1))
    return next((lines[part] for part in known if part in lines), 1)


class _Scanner:
    """Scans a file once. It looks at keys and only skips values."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokenize(text))
        self._at = 0
        self._lines: dict[Field, int] = {}
        self._lengths: dict[Field, int] = {}  # of arrays of tables; each [[name]] adds one

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
        path = self._header_path(self._key())
        self._take()
        if array:
            self._take()
            number = self._lengths.get(path, 0)
            self._lengths[path] = number + 1
            self._record(path, line)
            path = (*path, number)
        self._record(path, line)
        return path

    def _header_path(self, key: list[str]) -> Field:
        """Return a header's full path. A table inside an array of tables belongs to the last element."""
        path: Field = ()
        for part in key:
            if path in self._lengths:
                path = (*path, self._lengths[path] - 1)
            path = (*path, part)
        return path

    def _pair(self, table: Field) -> None:
        line = self._tokens[self._at][1]
        path = (*table, *self._key())
        self._take()  # the "="
        self._record(path, line)
        self._value(path)

    def _key(self) -> list[str]:
        parts = [_unquoted(self._word())]
        while self._skip() and self._peek() == ".":
            self._take()
            parts.append(_unquoted(self._word()))
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
                while self._at < len(self._tokens) and self._peek() not in ("\n", ",", "]", "}"):
                    self._at += 1

    def _elements(self, path: Field) -> None:
        number = 0
        while self._skip("\n") and self._peek() != "]":
            if self._peek() == ",":
                self._take()
                continue
            self._record((*path, number), self._tokens[self._at][1])
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

    def _record(self, path: Field, line: int) -> None:
        """Record where a field appears first, and the tables it implies."""
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)

    def _skip(self, *also: str) -> bool:
        """Move to the next meaningful token; return False at the end."""
        while self._at < len(self._tokens) and (self._peek()[0] in _BLANK or self._peek() in also):
            self._at += 1
        return self._at < len(self._tokens)

    def _peek(self) -> str:
        return self._tokens[self._at][0]

    def _take(self) -> tuple[str, int]:
        self._at += 1
        return self._tokens[self._at - 1]


def _tokenize(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for token in _TOKEN.findall(text):
        yield token, line
        line += token.count("\n")


def _unquoted(word: str) -> str:
    """Return a part of a key without its quotes."""
    return str(tomllib.loads(f"key = {word}")["key"]) if word[0] in "\"'" else word
