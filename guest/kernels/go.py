"""The Go kernel.

The go command looks at hundreds of files to find out what to compile, which takes a second in gVisor. A single file
that imports only the standard library does not need that if the image has the library compiled and a list of its
packages: then compiler, linker and vet are called directly, as the go command would call them.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH110, PTH123

import json
import os
import re
import shlex
from contextlib import suppress

from guest.kernels import compiled
from guest.places import BUILD, WORKSPACE

# Comments and white space before the first word of a file.
BEFORE_CODE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
PACKAGE = re.compile(r"package\s")
NO_MAIN = re.compile(r"^.*(function main is undeclared in the main package|: not package main$).*\n?", re.MULTILINE)

OBJECT = f"{BUILD}/main.a"
VET_ORDER = f"{BUILD}/vet.cfg"
# No tables for debuggers: a panic names functions and lines without them.
LINKED = ("-buildmode=exe", "-s", "-w")


class Library:
    """The compiled standard library of the image, with a list of its packages."""

    def __init__(self, root: str) -> None:
        """Read the list of packages. Raises OSError if the image has none."""
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
            "SucceedOnTypecheckFailure": True,  # the compiler reports type errors
        }

    def build(self) -> list[str]:
        """Return the command that compiles the program."""
        compiler = [f"{self._tools}/compile", "-p=main", f"-lang={self._version}", "-complete", "-pack"]
        linker = [f"{self._tools}/link", *LINKED, f"-importcfg={self._list}", "-o", compiled.PROGRAM, OBJECT]
        compiler += [f"-importcfg={self._list}", "-o", OBJECT, Go.source]
        return ["sh", "-c", f"{' '.join(compiler)} && exec {' '.join(linker)}"]

    def vet(self) -> list[str]:
        """Return the command that finds mistakes which compile."""
        with open(VET_ORDER, "w", encoding="utf-8") as file:
            json.dump(self._vet, file)
        return [f"{self._tools}/vet", VET_ORDER]


class Go:
    """One file; with a go.mod in the user's directory it can import more than the standard library."""

    compiler = "go"
    source = f"{BUILD}/main.go"

    def __init__(self) -> None:
        self._library: Library | None = None

    def prepare(self) -> None:
        """Find a compiled standard library."""
        with suppress(OSError):
            self._library = Library(os.environ.get("GOROOT", ""))

    def complete(self, code: str) -> compiled.Source:
        """Return the code with a package clause, added on the first line so that line numbers stay right."""
        if PACKAGE.match(code, BEFORE_CODE.match(code).end()):  # type: ignore[union-attr]
            return compiled.Source(code)
        return compiled.Source(f"package main; {code}", "`package main` was added: the code has no package clause")

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command with the flags before the file."""
        assert not sanitize, "the host never asks for it"
        if self._library and flags is None and not in_module():
            return self._library.build()
        return [self.compiler, "build", "-o", compiled.PROGRAM, *(flags or ()), self.source]

    def shown(self, command: list[str]) -> str:
        """Return what was run, shortened if it was not `go build`."""
        return shlex.join(command) if command[0] == self.compiler else "go tool compile main.go, go tool link"

    def checker(self) -> list[str]:
        """Return the command that finds mistakes which compile."""
        if self._library and not in_module():
            return self._library.vet()
        return [self.compiler, "vet", self.source]

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if the linker misses main: then everything was compiled."""
        return NO_MAIN.sub("", messages) if NO_MAIN.search(messages) else None


def in_module() -> bool:
    """Return whether the user has a module, which may have packages of its own."""
    return os.path.exists(f"{WORKSPACE}/go.mod")


_go = Go()


def prepare() -> None:
    """Set up the environment."""
    compiled.prepare(_go)
    _go.prepare()


def warm(code: str) -> None:
    """Compile and run warm-up code."""
    compiled.warm(_go, code)


def serve(control_fd: int, _figures: int) -> None:
    """Run code as the kernel of this process."""
    compiled.serve(_go, control_fd)
