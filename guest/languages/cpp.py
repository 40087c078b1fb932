"""C++: one file, compiled by g++."""

import re
import shlex

from guest.kernels import compiled
from guest.languages import Language
from guest.places import BUILD, WORKSPACE

LANGUAGE = Language(
    title="C++",
    template="cpp-algorithm",
    image="docker.io/library/gcc:14",
    suffixes=(".cpp", ".cc", ".cxx"),
    version=("g++", "-dumpfullversion"),
    warm_cells=(
        "#include <bits/stdc++.h>\nint main() { std::vector<int> v{2, 1}; std::sort(v.begin(), v.end());"
        ' std::cout << v[0] << "\\n"; }',
        "int main() { return }",
    ),
    compiled=True,
    sanitizers=("address", "undefined", "thread"),
    output_flag="-o|--output",  # g++ accepts the path in the same word
)
FLAGS = ["-O2", "-std=c++23"]  # the template's precompiled headers were built with them
TRACEABLE = ["-g", "-fno-omit-frame-pointer"]  # for line numbers; UBSan needs neither
NO_MAIN = re.compile(r"undefined reference to .main.(?!\S)")
# How the messages of linkers begin: GNU's with its own name, gold's with a file of the C library.
LINKER = re.compile(r"^((\S*/)?(ld|collect2)(\.\w+)?: |\S*/S?crt1\.o[:(])", re.MULTILINE)


class Cpp:
    """One file, compiled and linked in one step."""

    compiler = "g++"
    source = f"{BUILD}/main.cpp"

    def prepare(self) -> None:
        """Find everything ready."""

    def complete(self, code: str) -> compiled.Source:
        """Return the code unchanged."""
        return compiled.Source(code)

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command with the flags last: they override ours, and a library has to come after what needs it.

        Without -pipe: in gVisor, a file in memory is faster than two processes and a pipe.
        """
        checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
        if sanitize and sanitize != ["undefined"]:
            checks += TRACEABLE
        place = ["-iquote", WORKSPACE, self.source, "-o", compiled.PROGRAM]
        return [self.compiler, *place, *checks, *FLAGS, *(flags or ())]

    def shown(self, command: list[str]) -> str:
        """Return the command unchanged."""
        return shlex.join(command)

    def checker(self) -> None:
        """Return none: g++ has warnings of its own."""

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if the linker misses main: then everything was compiled."""
        linker = LINKER.search(messages)
        return messages[: linker.start()] if linker and NO_MAIN.search(messages, linker.start()) else None

    def program(self, _memory_bytes: int | None) -> list[str] | None:
        """Return the command that runs the program."""
        return compiled.linked_program()


def kernel() -> compiled.Service:
    """Return the kernel."""
    # Finding leaks needs ptrace, which not every machine has, and leaks are common in programs for algorithms.
    return compiled.Service(Cpp(), {"ASAN_OPTIONS": "detect_leaks=0"})
