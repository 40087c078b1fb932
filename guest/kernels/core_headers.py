"""The part of C++'s standard library that most programs need, compiled ahead by the template.

Since C++23 every <iostream> includes <format>. Its templates are instantiated again for each program, even from
precompiled headers, and take longer to compile than most programs. So the template has a second set of headers without
formatting, threads, regular expressions and file systems, and a list of the names that are only in what is left out.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123

import re

FOLDER = "/usr/local/lib/mcp-sandbox/core-headers"
NAMES = "names"  # the file in it with one name per line

# Comments and plain string literals mention names without using them. A raw string may look like anything.
UNUSED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
NAME = re.compile(r"[A-Za-z]\w*")
# Files of the user can use any name, and other code may ask which library it has.
OTHER_CODE = re.compile(r'R"|^\s*#\s*include\s*[^<\s]|__has_include|__cpp_lib_|_GLIBCXX_', re.MULTILINE)


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
        if not self._left_out or OTHER_CODE.search(code):
            return False
        return self._left_out.isdisjoint(NAME.findall(UNUSED.sub(" ", code)))
