"""Java: one file, compiled by javac, and its main class."""

import re
import shlex

from guest.kernels import compiled
from guest.languages import Language
from guest.places import BUILD, WORKSPACE

LANGUAGE = Language(
    title="Java",
    template="java",
    image="docker.io/library/eclipse-temurin:21",
    suffixes=(".java",),
    version=("javac", "--version"),
    warm_cells=(
        "import java.util.*;\npublic class Main { public static void main(String[] a) {"
        " System.out.println(new ArrayList<>(List.of(1, 2))); } }",
        "class Main { void f() { return 1 } }",
    ),
    compiled=True,
    output_flag="-d$|-d=",
)
CLASSES = f"{BUILD}/classes"
MIB = 1024 * 1024
# What a JVM needs besides its heap: classes, compiled code, stacks.
OVERHEAD_MB, HEAP_SHARE, LEAST_HEAP_MB = 32, 0.85, 16
# Both end soon and have little memory, so that collecting garbage in parallel would only cost time.
QUICK = ("-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData")
STACK = "-Xss256m"  # deep recursion is common in algorithms; only the used part takes memory
# What must not be mistaken for code: comments, text blocks, strings, characters.
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
WORD = re.compile(r"[{}]|\b(?:(public)\s+(?:[\w-]+\s+)*?)?(?:class|record|enum|interface)\s+(\w+)|\bvoid\s+(main)\s*\(")
PACKAGE = re.compile(r"^\s*package\s+([\w.]+)\s*;")


class Names:
    """What a source file defines."""

    def __init__(self, code: str) -> None:
        plain = NOT_CODE.sub(" ", code)
        package = PACKAGE.match(plain)
        self.public = self.main = ""  # a public class, which has to be in a file of its name; the one with main
        depth, outer = 0, ""
        for found in WORD.finditer(plain):
            public, name, main = found.groups()
            if name and not depth:
                outer = name
                self.public = self.public or (name if public else "")
            elif main:
                self.main = self.main or outer
            depth += {"{": 1, "}": -1}.get(found[0], 0)
        self.file = self.public or self.main or outer or "Main"
        self.runnable = f"{package[1]}.{self.main}" if package and self.main else self.main


class Java:
    """One file, of any name, with any classes."""

    compiler = "javac"
    source = f"{BUILD}/Main.java"

    def __init__(self) -> None:
        self._main = ""

    def prepare(self) -> None:
        """Find everything ready."""

    def complete(self, code: str) -> compiled.Source:
        """Return the code unchanged, for a file with the name of its public class."""
        names = Names(code)
        self.source, self._main = f"{BUILD}/{names.file}.java", names.runnable
        return compiled.Source(code)

    def command(self, flags: list[str] | None, _sanitize: list[str]) -> list[str]:
        """Return the command; C1 alone compiles a small file sooner."""
        quick = [f"-J{flag}" for flag in (*QUICK, "-XX:TieredStopAtLevel=1")]
        return [self.compiler, *quick, "-proc:none", "-cp", WORKSPACE, "-d", CLASSES, *(flags or ()), self.source]

    def shown(self, command: list[str]) -> str:
        """Return the command without the options of javac's own JVM."""
        return shlex.join(word for word in command if not word.startswith("-J"))

    def checker(self) -> None:
        """Return none: javac has warnings of its own."""

    def without_main(self, _messages: str) -> None:
        """Return none: javac compiles classes without a main."""

    def program(self, memory_bytes: int | None) -> list[str] | None:
        """Return the command that runs the main class, if there is one."""
        if not self._main:
            return None
        heap = []
        if memory_bytes is not None:
            heap_mb = max(LEAST_HEAP_MB, int((memory_bytes // MIB - OVERHEAD_MB) * HEAP_SHARE))
            heap = [f"-Xmx{heap_mb}m"]
        return ["java", *QUICK, STACK, *heap, "-cp", f"{CLASSES}:{WORKSPACE}", self._main]


def kernel() -> compiled.Service:
    """Return the kernel."""
    return compiled.Service(Java())
