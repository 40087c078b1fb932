"""C++: one file, compiled by g++, or by the programs that g++ would start.

g++ starts the compiler proper, the assembler and collect2, which starts the linker. In gVisor a process costs tens of
milliseconds. So without flags of the user, a shell starts these programs, without g++ and collect2. A program that
needs only the core of the standard library is compiled with smaller headers first (`guest.kernels.core_headers`).
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123

import os
import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from typing import NamedTuple

from guest.kernels import compiled
from guest.kernels.core_headers import CoreHeaders
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
NO_PLUGIN = "-fno-use-linker-plugin"  # only objects for link-time optimisation need it
COLLECT2 = re.compile(r"\S*/collect2 ")
TEMPORARY = re.compile(r"\S*/cc\w{6}\.([so])\b")  # the files that g++ passes from one program to the next
ASK_S = 60.0  # g++ answers in 10 ms; an emulated CPU takes longer
READ_BY_DRIVER = ("COMPILER_PATH", "GCC_EXEC_PREFIX", "LIBRARY_PATH")  # variables that the other programs do not know
# As g++ and collect2 do. When the compiler proper crashes, g++ has more to say; a second try after a kill would only
# take as much memory again.
KILLED = "g++: fatal error: Killed signal terminated program cc1plus"
COMPILE = """{compile} || case $? in
1) exit 1 ;;
137) echo "{killed}" >&2; exit 1 ;;
*) exec {driver} ;;
esac"""
REST = """{assemble} || exit 1
{link} || {{ echo "collect2: error: ld returned $? exit status" >&2; exit 1; }}
"""
MESSAGES = f"{BUILD}/messages"
# Whatever the smaller headers lack is in the others, so only messages about those are shown.
WITH_CORE = """{core} 2>{messages}
case $? in
0) [ ! -s {messages} ] || cat {messages} >&2 ;;
137) echo "{killed}" >&2; exit 1 ;;
*) rm -f {messages}
{compile} ;;
esac"""
OTHER_HEADERS = ("CPATH", "CPLUS_INCLUDE_PATH")  # variables whose folders come before the core headers


class Cpp:
    """One file, compiled and linked in one step."""

    compiler = "g++"
    source = f"{BUILD}/main.cpp"

    def __init__(self, headers: CoreHeaders | None = None) -> None:
        self._headers = headers or CoreHeaders()
        self._steps: Steps | None = None
        self._core = False  # the core headers suffice for the code

    def prepare(self) -> None:
        """Find out what g++ would start for a file that exists."""
        self._headers.load()
        with suppress(OSError, subprocess.SubprocessError):  # g++ itself is called then
            compiled.empty(BUILD)
            with open(self.source, "w", encoding="utf-8"):
                pass
            self._steps = steps_of(self._driver([], []), self._headers.folder)

    def complete(self, code: str) -> compiled.Source:
        """Return the code unchanged."""
        self._core = self._headers.suffice(code)
        return compiled.Source(code)

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command that does what g++ does with these flags."""
        if self._steps and not flags and not sanitize and not any(name in os.environ for name in READ_BY_DRIVER):
            core = self._core and not any(name in os.environ for name in OTHER_HEADERS)
            return ["sh", "-c", self._steps.with_core if core else self._steps.plain]
        return self._driver(flags or [], sanitize)

    def _driver(self, flags: list[str], sanitize: list[str]) -> list[str]:
        """Return the command with the flags last: they override ours, and a library has to come after what needs it.

        Without -pipe: in gVisor, a file in memory is faster than two processes and a pipe.
        """
        checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
        if sanitize and sanitize != ["undefined"]:
            checks += TRACEABLE
        place = ["-iquote", WORKSPACE, self.source, "-o", compiled.PROGRAM]
        return [self.compiler, *place, *checks, *FLAGS, *flags]

    def shown(self, command: list[str]) -> str:
        """Return the command of g++, whoever was called."""
        return shlex.join(command if command[0] == self.compiler else self._driver([], []))

    def checker(self) -> None:
        """Return none: g++ has warnings of its own."""

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if the linker misses main: then everything was compiled."""
        linker = LINKER.search(messages)
        return messages[: linker.start()] if linker and NO_MAIN.search(messages, linker.start()) else None

    def program(self, _memory_bytes: int | None) -> list[str] | None:
        """Return the command that runs the program."""
        return compiled.linked_program()


class Steps(NamedTuple):
    """Shell scripts that do what a command of g++ does."""

    plain: str
    with_core: str  # with the core headers, and again with all of them if that fails


def steps_of(driver: list[str], headers: str) -> Steps | None:
    """Return what does the same as a command of g++; None if g++ does not say what it would start."""
    asked = subprocess.run([*driver, NO_PLUGIN, "-###"], capture_output=True, text=True, check=False, timeout=ASK_S)
    commands = [line.strip() for line in asked.stderr.splitlines() if line.startswith(" ")]
    linker = shutil.which("ld")
    if asked.returncode or len(commands) != 3 or not COLLECT2.match(commands[2]) or linker is None:
        return None
    first, assemble, last = (TEMPORARY.sub(rf"{BUILD}/main.\1", command) for command in commands)
    link = COLLECT2.sub(f"{linker} ", last, count=1)
    compiler, _, options = first.replace(f" {NO_PLUGIN}", "").partition(" ")
    compile_ = COMPILE.format(compile=f"{compiler} {options}", killed=KILLED, driver=shlex.join(driver))
    with_core = f"{compiler} -I {headers} {options}"
    core = WITH_CORE.format(core=with_core, messages=MESSAGES, killed=KILLED, compile=compile_)
    rest = REST.format(assemble=assemble, link=link)
    return Steps(f"{compile_}\n{rest}", f"{core}\n{rest}")


def kernel() -> compiled.Service:
    """Return the kernel."""
    # Finding leaks needs ptrace, which not every machine has, and leaks are common in programs for algorithms.
    return compiled.Service(Cpp(), {"ASAN_OPTIONS": "detect_leaks=0"})
