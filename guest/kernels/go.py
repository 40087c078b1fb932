"""The Go kernel: the go command and what is special about it."""

import re

from guest.kernels import compiled
from guest.places import BUILD

# Comments, and whatever else may stand before the first word of a file.
BEFORE_CODE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
PACKAGE = re.compile(r"package\s")
NO_MAIN = re.compile(r"^.*function main is undeclared in the main package.*\n?", re.MULTILINE)


class Go:
    """One file; a go.mod in the user's directory says what it may import besides the standard library."""

    compiler = "go"
    source = f"{BUILD}/main.go"

    def complete(self, code: str) -> compiled.Source:
        """A file begins with its package. On the first line, so that the numbers of lines stay true."""
        if PACKAGE.match(code, BEFORE_CODE.match(code).end()):  # type: ignore[union-attr]
            return compiled.Source(code)
        return compiled.Source(f"package main; {code}", "`package main` was put before the code, which has no package")

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Flags come before files."""
        assert not sanitize, "the host does not ask for it"
        return [self.compiler, "build", "-o", compiled.PROGRAM, *(flags or ()), self.source]

    def checker(self) -> list[str]:
        """Mistakes that compile."""
        return [self.compiler, "vet", self.source]

    def without_main(self, said: str) -> str | None:
        """Only the linker misses main, so all was compiled by then."""
        return NO_MAIN.sub("", said) if NO_MAIN.search(said) else None


_go = Go()


def prepare() -> None:
    """Get ready to compile."""
    compiled.prepare(_go)


def warm(code: str) -> None:
    """Compile and run warm-up code."""
    compiled.warm(_go, code)


def serve(control_fd: int, _figures: int) -> None:
    """Be the live kernel of this process."""
    compiled.serve(_go, control_fd)
