"""The Go kernel: Go's tools and what is special about them.

The go command looks at hundreds of files to find out what has to be compiled, which takes gVisor a second. A single
file that imports nothing but the standard library needs none of that, where the image has the library compiled and a
list of its packages: then compiler, linker and vet are called as the go command would.
"""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH110, PTH123

import json
import os
import re
import shlex
from contextlib import suppress

from guest.kernels import compiled
from guest.places import BUILD, WORKSPACE

# Comments, and whatever else may stand before the first word of a file.
BEFORE_CODE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
PACKAGE = re.compile(r"package\s")
NO_MAIN = re.compile(r"^.*(function main is undeclared in the main package|: not package main$).*\n?", re.MULTILINE)

OBJECT = f"{BUILD}/main.a"
VET_ORDER = f"{BUILD}/vet.cfg"
# No tables for debuggers: nobody has one, and a panic names functions and lines without them.
LINKED = ("-buildmode=exe", "-s", "-w")


class Library:
    """The standard library as the image has it: compiled, with a list of its packages."""

    def __init__(self, root: str) -> None:
        """Raises OSError: this image has no such list."""
        self._tools = f"{root}/pkg/tool/linux_amd64"
        self._list = f"{root}/pkg/linux_amd64/importcfg"
        with open(self._list, encoding="utf-8") as file:
            files = dict(line.split()[1].split("=") for line in file)
        with open(f"{root}/VERSION", encoding="utf-8") as file:
            version = re.match(r"go\d+\.\d+", file.read())
        self._version = version[0] if version else ""
        self._vet = {
            "ID": "main",
            "Compiler": "gc",
            "ImportPath": "main",
            "GoVersion": self._version,
            "GoFiles": [Go.source],
            "ImportMap": {name: name for name in files},
            "PackageFile": files,
            "Standard": dict.fromkeys(files, True),
            "VetxOutput": f"{BUILD}/vet.facts",
            "SucceedOnTypecheckFailure": True,  # the compiler says it better
        }

    def build(self) -> list[str]:
        """What makes the program."""
        compiler = [f"{self._tools}/compile", "-p=main", f"-lang={self._version}", "-complete", "-pack"]
        linker = [f"{self._tools}/link", *LINKED, f"-importcfg={self._list}", "-o", compiled.PROGRAM, OBJECT]
        compiler += [f"-importcfg={self._list}", "-o", OBJECT, Go.source]
        return ["sh", "-c", f"{' '.join(compiler)} && exec {' '.join(linker)}"]

    def vet(self) -> list[str]:
        """What looks for mistakes that compile."""
        with open(VET_ORDER, "w", encoding="utf-8") as file:
            json.dump(self._vet, file)
        return [f"{self._tools}/vet", VET_ORDER]


class Go:
    """One file; a go.mod in the user's directory says what it may import besides the standard library."""

    compiler = "go"
    source = f"{BUILD}/main.go"

    def __init__(self) -> None:
        self._library: Library | None = None

    def prepare(self) -> None:
        """Look for a compiled standard library."""
        with suppress(OSError):
            self._library = Library(os.environ.get("GOROOT", ""))

    def complete(self, code: str) -> compiled.Source:
        """A file begins with its package. On the first line, so that the numbers of lines stay true."""
        if PACKAGE.match(code, BEFORE_CODE.match(code).end()):  # type: ignore[union-attr]
            return compiled.Source(code)
        return compiled.Source(f"package main; {code}", "`package main` was put before the code, which has no package")

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Flags come before files."""
        assert not sanitize, "the host does not ask for it"
        if self._library and flags is None and not in_module():
            return self._library.build()
        return [self.compiler, "build", "-o", compiled.PROGRAM, *(flags or ()), self.source]

    def told(self, command: list[str]) -> str:
        """The long way round has the same end as `go build`, but it is not what was run."""
        return shlex.join(command) if command[0] == self.compiler else "go tool compile main.go, go tool link"

    def checker(self) -> list[str]:
        """Mistakes that compile."""
        if self._library and not in_module():
            return self._library.vet()
        return [self.compiler, "vet", self.source]

    def without_main(self, said: str) -> str | None:
        """Only the linker misses main, so all was compiled by then."""
        return NO_MAIN.sub("", said) if NO_MAIN.search(said) else None


def in_module() -> bool:
    """Whether the user has a module, which may have packages of its own."""
    return os.path.exists(f"{WORKSPACE}/go.mod")


_go = Go()


def prepare() -> None:
    """Get ready to compile."""
    compiled.prepare(_go)
    _go.prepare()


def warm(code: str) -> None:
    """Compile and run warm-up code."""
    compiled.warm(_go, code)


def serve(control_fd: int, _figures: int) -> None:
    """Be the live kernel of this process."""
    compiled.serve(_go, control_fd)
