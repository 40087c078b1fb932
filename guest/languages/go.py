"""Go: one file, compiled with or without the go command.

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
import shutil
import subprocess
from contextlib import suppress

from guest.kernels import compiled
from guest.languages import Language
from guest.places import BUILD, WORKSPACE

LANGUAGE = Language(
    title="Go",
    template="go-algorithm",
    image="docker.io/library/golang:1.24",
    suffixes=(".go",),
    version=("go", "env", "GOVERSION"),
    warm_cells=(
        'package main\nimport ("bufio"; "fmt"; "os"; "sort"; "strings")\nfunc main() { v := []int{2, 1}; sort.Ints(v);'
        " w := bufio.NewWriter(os.Stdout); defer w.Flush(); fmt.Fprintln(w, v, strings.ToUpper(`a`)) }",
        "func main() { return 1 }",
    ),
    compiled=True,
    sanitizers=("thread",),
    output_flag="--?o(=|$)",  # go takes the path after an equals sign
)

# Comments and white space before the first word of a file.
BEFORE_CODE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
PACKAGE = re.compile(r"package\s")
NO_MAIN = re.compile(r"^.*(function main is undeclared in the main package|: not package main$).*\n?", re.MULTILINE)

OBJECT = f"{BUILD}/main.a"
VET_ORDER = f"{BUILD}/vet.cfg"
RACE_RUNTIME = "{}/src/runtime/race/internal/amd64v1/race_linux.syso"
NO_RACE = (
    "the race detector needs gcc and Go's compiled race runtime, which Debian leaves out of its packages. "
    "Use a template made from Go's own image, such as golang:1.24"
)
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
        self._root = ""

    def prepare(self) -> None:
        """Find a compiled standard library."""
        self._root = os.environ.get("GOROOT", "")
        with suppress(OSError):
            self._library = Library(self._root)
        if not self._root:  # as in images of Go's own
            asked = subprocess.run([self.compiler, "env", "GOROOT"], capture_output=True, text=True, check=False)
            self._root = asked.stdout.strip()

    def complete(self, code: str) -> compiled.Source:
        """Return the code with a package clause, added on the first line so that line numbers stay right."""
        if PACKAGE.match(code, BEFORE_CODE.match(code).end()):  # type: ignore[union-attr]
            return compiled.Source(code)
        return compiled.Source(f"package main; {code}", "`package main` was added: the code has no package clause")

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command with the flags before the file. Raises RuntimeError if the race detector is missing."""
        flags = [*(["-race"] if sanitize else []), *(flags or ())]
        if self._library and not flags and not in_module():
            return self._library.build()
        build = [self.compiler, "build", "-o", compiled.PROGRAM, *flags, self.source]
        if "-race" not in flags:
            return build
        if not os.path.exists(RACE_RUNTIME.format(self._root)) or shutil.which("gcc") is None:
            raise RuntimeError(NO_RACE)
        return ["env", "CGO_ENABLED=1", *build]

    def shown(self, command: list[str]) -> str:
        """Return what was run, shortened if it was not `go build`."""
        return shlex.join(command) if self.compiler in command else "go tool compile main.go, go tool link"

    def checker(self) -> list[str]:
        """Return the command that finds mistakes which compile."""
        if self._library and not in_module():
            return self._library.vet()
        return [self.compiler, "vet", self.source]

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if the linker misses main: then everything was compiled."""
        return NO_MAIN.sub("", messages) if NO_MAIN.search(messages) else None

    def program(self, _memory_bytes: int | None) -> list[str] | None:
        """Return the command that runs the program."""
        return compiled.linked_program()


def in_module() -> bool:
    """Return whether the user has a module, which may have packages of its own."""
    return os.path.exists(f"{WORKSPACE}/go.mod")


def kernel() -> compiled.Service:
    """Return the kernel."""
    return compiled.Service(Go())
