"""The part of C++'s standard library that most programs need, compiled ahead by the template.

Since C++23 every <iostream> includes <format>. Its templates are instantiated again for each program, even from
precompiled headers, and take longer to compile than most programs. So the template has a second set of headers without
formatting, clocks, threads, regular expressions and file systems, and a list of the names that they lack.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123

import re

FOLDER = "/usr/local/lib/mcp-sandbox/core-headers"
NAMES = "names"  # the file in it with one name per line

MOST_CHARACTERS = 100_000  # of a program; the patterns are linear, but the sandbox waits for them

# Comments and literals mention names without using them. Unterminated ones end where the line or the code does.
UNUSED = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|'(?:\\.|[^'\\\n])'|"(?:\\.|[^"\\\n])*"?""",
    re.DOTALL,
)
NAME = re.compile(r"[A-Za-z]\w*")
INCLUDE = re.compile(r"^[ \t\v\f]*(?:#|%:)[ \t\v\f]*(?:include|import)\w*[ \t\v\f]*([^\n]*)", re.MULTILINE)
STANDARD = re.compile(r"<(?:\w+(?:\.h)?|bits/stdc\+\+\.h)>\s*$")
# A raw string may look like anything, and other code asks which library it has.
OTHER_CODE = re.compile(r'R"|__has_include|__cpp_lib_|_GLIBCXX_')


class CoreHeaders:
    """Which programs can be compiled with the smaller headers. Without the template's list of names, none."""

    def __init__(self, folder: str = FOLDER) -> None:
        self.folder = folder
        self._left_out: frozenset[str] = frozenset()

    def load(self) -> None:
        """Read the names that are left out, if the template has such headers."""
        try:
            with open(f"{self.folder}/{NAMES}", encoding="ascii") as file:
                self._left_out = frozenset(file.read().split())
        except OSError:
            self._left_out = frozenset()

    def suffice(self, code: str) -> bool:
        """Return whether a program mentions nothing that is left out."""
        if not self._left_out or len(code) > MOST_CHARACTERS or OTHER_CODE.search(code):
            return False
        used = UNUSED.sub(" ", code)
        # Files of the user, and of other libraries, can use any name.
        standard = all(STANDARD.match(found[1]) for found in INCLUDE.finditer(used))
        return standard and self._left_out.isdisjoint(NAME.findall(used))
