"""The C++ kernel."""

import os
import re
import shlex

from guest.kernels import compiled
from guest.places import BUILD, WORKSPACE

FLAGS = ["-O2", "-std=c++20"]  # the template's precompiled headers were built with them
TRACEABLE = ["-g", "-fno-omit-frame-pointer"]  # for line numbers; UBSan needs neither
NO_MAIN = re.compile(r"undefined reference to .main.(?!\S)")
# How the messages of linkers begin: GNU's with its own name, gold's with a file of the C library.
LINKER = re.compile(r"^((\S*/)?(ld|collect2)(\.\w+)?: |\S*/S?crt1\.o[:(])", re.MULTILINE)


class Cpp:
    """One file, compiled and linked in one step."""

    compiler = "g++"
    source = f"{BUILD}/main.cpp"

    def complete(self, code: str) -> compiled.Source:
        """Return the code unchanged."""
        return compiled.Source(code)

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command with the flags last, because a library has to come after what needs it.

        Without -pipe: in gVisor, a file in memory is faster than two processes and a pipe.
        """
        checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
        if sanitize and sanitize != ["undefined"]:
            checks += TRACEABLE
        place = ["-iquote", WORKSPACE, self.source, "-o", compiled.PROGRAM]
        return [self.compiler, *place, *checks, *(FLAGS if flags is None else flags)]

    def shown(self, command: list[str]) -> str:
        """Return the command unchanged."""
        return shlex.join(command)

    def checker(self) -> None:
        """Return none: g++ has warnings of its own."""

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if the linker misses main: then everything was compiled."""
        linker = LINKER.search(messages)
        return messages[: linker.start()] if linker and NO_MAIN.search(messages, linker.start()) else None


_cpp = Cpp()


def prepare() -> None:
    """Set up the environment."""
    # Finding leaks needs ptrace, which not every machine has, and leaks are common in programs for algorithms.
    os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0")
    compiled.prepare(_cpp)


def warm(code: str) -> None:
    """Compile and run warm-up code."""
    compiled.warm(_cpp, code)


def serve(control_fd: int, _figures: int) -> None:
    """Run code as the kernel of this process."""
    compiled.serve(_cpp, control_fd)
