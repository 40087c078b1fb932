"""The C++ kernel: g++ and what is special about it."""

import os
import re
import shlex

from guest.kernels import compiled
from guest.places import BUILD, WORKSPACE

FLAGS = ["-O2", "-std=c++20"]  # what the precompiled headers of the template were made with
TRACEABLE = ["-g", "-fno-omit-frame-pointer"]  # a sanitizer names lines; the one of undefined behaviour does without
NO_MAIN = re.compile(r"undefined reference to .main.(?!\S)")
# How the linkers begin: that of GNU with its own name, gold with a file of the C library's.
LINKER = re.compile(r"^((\S*/)?(ld|collect2)(\.\w+)?: |\S*/S?crt1\.o[:(])", re.MULTILINE)


class Cpp:
    """One file, compiled and linked in one step."""

    compiler = "g++"
    source = f"{BUILD}/main.cpp"

    def complete(self, code: str) -> compiled.Source:
        """The code as it is."""
        return compiled.Source(code)

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Flags come last: a library has to come after what needs it.

        Without -pipe: two processes that wait for each other cost gVisor more than a file in memory.
        """
        checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
        if sanitize and sanitize != ["undefined"]:
            checks += TRACEABLE
        place = ["-iquote", WORKSPACE, self.source, "-o", compiled.PROGRAM]
        return [self.compiler, *place, *checks, *(FLAGS if flags is None else flags)]

    def told(self, command: list[str]) -> str:
        """As it is."""
        return shlex.join(command)

    def checker(self) -> None:
        """The compiler has warnings of its own, with flags of its own."""

    def without_main(self, said: str) -> str | None:
        """Only the linker misses main, so all was compiled by then."""
        linker = LINKER.search(said)
        return said[: linker.start()] if linker and NO_MAIN.search(said, linker.start()) else None


_cpp = Cpp()


def prepare() -> None:
    """Get ready to compile."""
    # Looking for leaks needs ptrace, which not every machine has, and programs that solve one problem leak by habit.
    os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0")
    compiled.prepare(_cpp)


def warm(code: str) -> None:
    """Compile and run warm-up code."""
    compiled.warm(_cpp, code)


def serve(control_fd: int, _figures: int) -> None:
    """Be the live kernel of this process."""
    compiled.serve(_cpp, control_fd)
