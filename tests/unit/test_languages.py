"""The contract of languages: one module and one template each."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from guest.kernels import runner
from guest.kernels.core_headers import MOST_CHARACTERS, CoreHeaders
from guest.kernels.runner import OOM_BYTES, Program, was_oom_killed
from guest.languages import NAMES, go, kernel, language
from guest.languages.cpp import Cpp, Steps, steps_of
from guest.languages.go import Go
from guest.languages.java import Java, Names
from templates.catalogue import Catalogue
from templates.guest_code import guest_files


@pytest.mark.parametrize("name", NAMES)
def test_every_language_has_a_built_in_template(name: str):
    assert Catalogue().load(language(name).template).language == name


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"python", "shell"}))
def test_every_other_language_has_a_kernel_that_needs_only_the_standard_library(name: str):
    made = kernel(name)
    assert all(callable(getattr(made, method)) for method in ("prepare", "warm", "serve"))


def test_no_two_languages_share_a_suffix():
    suffixes = [suffix for name in NAMES for suffix in language(name).suffixes]
    assert len(suffixes) == len(set(suffixes))


def test_host_programs_of_interpreters_are_in_machines():
    assert {"guest/languages/javascript.js", "guest/languages/r.R"} <= guest_files().keys()


def test_flags_are_added_to_the_default_ones():
    command = Cpp().command(["-std=c++20"], [])
    assert command[-3:] == ["-O2", "-std=c++23", "-std=c++20"]  # g++ takes the last standard


GCC_SAYS = """Using built-in specs.
 /usr/libexec/cc1plus -quiet main.cpp "-std=c++23" -fno-use-linker-plugin -o /tmp/ccAb12Cd.s
COLLECT_GCC_OPTIONS='-o' 'program'
 as --64 -o /tmp/ccXy34Zw.o /tmp/ccAb12Cd.s
 /usr/libexec/collect2 -pie -o program /tmp/ccXy34Zw.o "-lstdc++"
"""


def gcc_that_says(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command of a g++ that answers with `text` when asked what it would start."""
    for name in ("g++", "ld"):
        (folder / name).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{text}END\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return ["g++", "main.cpp"]


def test_the_programs_that_gcc_would_start_are_started_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = steps_of(gcc_that_says(GCC_SAYS, tmp_path, monkeypatch), "/core")
    assert steps is not None
    lines = steps.plain.splitlines()
    assert [line.partition(" ||")[0] for line in lines if " || " in line] == [
        '/usr/libexec/cc1plus -quiet main.cpp "-std=c++23" -o /tmp/.build/main.s',
        "as --64 -o /tmp/.build/main.o /tmp/.build/main.s",
        f'{tmp_path}/ld -pie -o program /tmp/.build/main.o "-lstdc++"',
    ]


def test_code_that_needs_only_core_headers_is_compiled_with_those_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "names").write_text("thread\nformat\n")
    gcc_that_says(GCC_SAYS, tmp_path, monkeypatch)
    cpp = Cpp(CoreHeaders(str(tmp_path)))
    monkeypatch.setattr("guest.languages.cpp.BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(cpp, "source", str(tmp_path / "build/main.cpp"))
    cpp.prepare()
    cpp.complete("#include <iostream>\nint main() {}")
    assert f"cc1plus -I {tmp_path} -quiet main.cpp" in cpp.command(None, [])[2]
    monkeypatch.setenv("CPATH", "/workspace/include")  # it comes before them
    assert "-I" not in cpp.command(None, [])[2].split()
    monkeypatch.delenv("CPATH")
    cpp.complete("#include <thread>\nint main() {}")
    assert "-I" not in cpp.command(None, [])[2].split()


@pytest.mark.parametrize(
    ("code", "enough"),
    [
        ("#include <iostream>\nint main() {}", True),
        ("#include <iostream>\nint threads, formatted; // a thread, a format", True),
        ('#include <iostream>\nauto text = "format \\" thread"; /* format\nthread */', True),
        ("#include <format>", False),
        ('auto text = ""; std::thread t;', False),
        ('auto text = R"(\n)"; int main() {}', False),  # a raw string may contain what looks like the end of a comment
        ("#include <bits/stdc++.h> // all\n#include <math.h>\nchar c = '\"', d = 'x';", True),
        ('#include <iostream>\n#  include "mine.h"', False),  # it may use any name
        ('%:include "mine.h"', False),
        ('#import "mine.h"', False),
        ('/**/#include "mine.h"', False),
        ("#include </workspace/mine.h>", False),
        ("#include <boost/any.hpp>", False),
        ("#include HEADER", False),
        ("int n;\n" * 20_000, False),  # too long to look at
        ("#ifdef __cpp_lib_print\n#endif", False),
        ("#define _GLIBCXX_DEBUG\n#include <vector>", False),
    ],
)
def test_core_headers_suffice_for_code_that_mentions_nothing_else(code: str, enough: bool, tmp_path: Path):
    (tmp_path / "names").write_text("thread\nformat\n")
    headers = CoreHeaders(str(tmp_path))
    assert not headers.suffice(code)  # not loaded: a template without such headers
    headers.load()
    assert headers.suffice(code) is enough


@pytest.mark.timeout(20)  # milliseconds; with patterns that look back at each step it took minutes
@pytest.mark.parametrize("odd", ["\n", "\r\n", '\\"', "/* ", '"a\\', "'", "# "])
def test_odd_code_is_looked_at_in_no_time(odd: str, tmp_path: Path):
    (tmp_path / "names").write_text("thread\n")
    headers = CoreHeaders(str(tmp_path))
    headers.load()
    assert headers.suffice((odd * MOST_CHARACTERS)[:MOST_CHARACTERS])  # it mentions no name


def test_a_gcc_that_does_not_say_what_it_would_start_is_called_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert steps_of(gcc_that_says("clang version 19\n", tmp_path, monkeypatch), "/core") is None
    assert Cpp().command(None, [])[0] == "g++"


@pytest.mark.parametrize("name", ["LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"])
def test_gcc_itself_is_called_for_variables_that_only_it_reads(name: str, monkeypatch: pytest.MonkeyPatch):
    cpp = Cpp()
    monkeypatch.setattr(cpp, "_steps", Steps("true", "true"))
    assert cpp.command(None, [])[0] == "sh"
    monkeypatch.setenv(name, "/workspace/lib")
    assert cpp.command(None, [])[0] == "g++"


@pytest.mark.parametrize(
    ("code", "file", "main"),
    [
        ("public class A { static class B {} public static void main(String[] a) {} }", "A", "A"),
        ("class X {} class Y { void f() {} public static void main(String... a) {} }", "Y", "Y"),
        ('package q.w; public record R(int a) { static void main(String[] a) { var s = "class Z {"; } }', "R", "q.w.R"),
        ("public final class S {}\nclass H { public static void main(String[] x) {} }", "S", "H"),
        ("/* class No { */ class N { }", "N", ""),
        ("int x;", "Main", ""),
    ],
)
def test_java_code_goes_into_the_file_of_its_class_and_its_main_class_runs(code: str, file: str, main: str):
    names = Names(code)
    assert (names.file, names.runnable) == (file, main)


def test_a_jvm_gets_less_heap_than_its_program_may_use():
    java = Java()
    java.complete("class Main { public static void main(String[] a) {} }")
    command = java.program(256 * 2**20)
    assert command is not None
    assert "-Xmx190m" in command
    java.complete("class Main {}")
    assert java.program(None) is None


def test_the_race_detector_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOROOT", str(tmp_path))
    kernel_of_go = Go()
    kernel_of_go.prepare()
    for flags, sanitize in ((["-race"], []), (None, ["thread"])):
        with pytest.raises(RuntimeError, match="Debian leaves out"):
            kernel_of_go.command(flags, sanitize)
    runtime = Path(go.RACE_RUNTIME.format(tmp_path))
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert kernel_of_go.command(None, ["thread"])[:4] == ["env", "CGO_ENABLED=1", "go", "build"]


def test_a_small_program_that_kills_itself_was_not_killed_for_its_memory(monkeypatch: pytest.MonkeyPatch):
    program = Program(["sh", "-c", "kill -KILL $$"])
    status = os.waitpid(program.pid, 0)[1]
    program.close()
    monkeypatch.setattr(runner, "oom_kills", lambda: program.oom_kills + 1)  # of another process at the same time
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not was_oom_killed(program, status, 20 * 2**20)
    assert was_oom_killed(program, status, OOM_BYTES + 1)
