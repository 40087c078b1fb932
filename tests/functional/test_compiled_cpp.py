"""C++ through a real agent and its kernel, with this host's g++."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Output, RunCode, WarmUp
from guest.client.reports import CaseResult, CompiledReport, ProcessEnd
from guest.errors import RequestRefused
from guest.places import BUILD
from tests.functional.guest_harness import Result, active, agent_client, command, run, send
from tests.waiting import HANG_S

LIMIT_S = HANG_S
CPP = WarmUp(language="cpp")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="this host has no g++")

HELLO = '#include <cstdio>\nint main() { puts("hello"); }'
ECHO = "#include <cstdio>\nint main() { for (int c; (c = getchar()) != EOF;) putchar(c); }"
# Does what its input says.
OBEDIENT = r"""
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
int main() {
    char order = 0;
    scanf(" %c", &order);
    printf("%c\n", order);
    fflush(stdout);
    switch (order) {
        case 'l': for (;;);
        case 'p': for (;;) puts("and on and on");
        case 'm': for (;;) for (volatile char* p = new char[1 << 20], *end = p + (1 << 20); p < end; p += 4096) *p = 1;
        case 'b': throw std::bad_alloc();
        case 'a': abort();
        case 'k': raise(SIGKILL);
        case 'e': fputs("no such luck\n", stderr); return 3;
    }
}
"""
HOG = """
#include <unistd.h>
int main() {
    for (int mb = 0; mb < 600; ++mb) {  // bounded, in case the limit does not work
        volatile char* p = new char[1 << 20];
        for (int i = 0; i < 1 << 20; i += 4096) p[i] = 1;
    }
    pause();
}
"""
STUBBORN = """
#include <csignal>
#include <cstdio>
int main() { signal(SIGINT, SIG_IGN); puts("on"); fflush(stdout); for (;;); }
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client(CPP) as client:
        yield client


@pytest.fixture(autouse=True)
async def limit(anyio_backend: str) -> AsyncIterator[None]:
    with anyio.fail_after(LIMIT_S):
        yield


CONVERSATION = """
#include <cstdio>
int main() { puts("begun"); fflush(stdout); char w[99]; while (scanf("%98s", w) == 1) { puts(w); fflush(stdout); } }
"""


async def test_a_program_reads_input_that_is_sent_while_it_is_active(machine):
    async with active(machine, CONVERSATION, "code", stdin_open=True) as program:
        await send(program.run, "one ")
        await program.wrote("one\n")
        assert (await command(machine, "echo beside")).stdout == "beside\n"
        await send(program.run, "two")
        await program.run.close_stdin()
        assert (await program.end()).stdout == "begun\none\ntwo\n"
    assert (await run(machine, ECHO)).stdout == ""


def report_of(result: Result) -> CompiledReport:
    assert result.report is not None
    return result.report


def end_of(measured: CompiledReport | CaseResult) -> ProcessEnd:
    assert measured.end is not None
    return measured.end


async def run_cases(machine: AgentClient, code: str, *cases: dict[str, Any], **options: Any) -> tuple[CaseResult, ...]:
    result = await run(machine, code, options={"cases": cases, **options})
    assert result.finished.status == "ok", result.finished.error
    return report_of(result).cases


async def stop_when_it_has_spoken(machine: AgentClient, code: str, **options: Any) -> Result:
    """Run code, stop it after its first output, and return the result."""
    async with machine.run(RunCode(code, options=options or None)) as events:
        seen = []
        async for event in events:
            seen.append(event)
            if isinstance(event, Output):
                await events.stop()
        return Result(seen)


# ---------------------------------------------------------------- one program


async def test_a_program_is_compiled_and_run_and_both_are_measured(machine):
    result = await run(machine, HELLO)
    report = report_of(result)
    assert (result.stdout, result.finished.status, result.finished.exit_code) == ("hello\n", "ok", 0)
    assert report.phase == "run"
    assert report.command.startswith("g++ ")
    assert "-O2 -std=c++23" in report.command
    assert report.compile_ms > 0
    assert (end_of(report).exit_code, end_of(report).signal) == (0, None)
    assert (end_of(report).peak_bytes or 0) > 0


async def test_a_program_reads_what_is_given_as_stdin(machine):
    text = "first\nzweite, mit Umlaut: ü\n" * 1000
    assert (await run(machine, ECHO, options={"stdin": text})).stdout == text
    assert (await run(machine, ECHO)).stdout == ""


async def test_compiler_errors_have_line_numbers_and_nothing_is_run(machine):
    result = await run(machine, "int main() {\n  return nothing;\n}")
    report = report_of(result)
    assert (result.finished.status, result.error.name) == ("error", "CompileError")
    assert (report.phase, report.end) == ("compile", None)
    assert "main.cpp:2:10: error: ‘nothing’ was not declared" in report.diagnostics  # noqa: RUF001 - g++ says so
    assert "/tmp" not in report.diagnostics


async def test_warnings_come_with_a_program_that_runs(machine):
    result = await run(machine, "int main() { int unused; }", options={"flags": ["-Wall"]})
    assert result.finished.status == "ok"
    assert "unused variable" in report_of(result).diagnostics


@pytest.mark.parametrize(
    "code", ["int twice(int x) { return 2 * x; }", "int elsewhere(); int f() { return elsewhere(); }"]
)
async def test_code_without_a_main_function_is_only_checked(machine, code):
    result = await run(machine, code)
    report = report_of(result)
    assert (result.finished.status, report.phase, report.diagnostics) == ("ok", "check", "")


async def test_a_compiler_error_that_quotes_the_linker_is_an_error(machine):
    result = await run(machine, "#error undefined reference to 'main'")
    assert (result.finished.status, report_of(result).phase) == ("error", "compile")


async def test_only_flags_take_a_compiler_driver(machine):
    """A driver removes what the assembler has made; without one it stays until the next run."""
    for options, kept in ({"flags": ["-Wall"]}, ""), ({"sanitize": ["undefined"]}, ""), ({}, "/tmp/.build/main.o\n"):
        report = report_of(await run(machine, HELLO, options=options))
        assert report.command.startswith("g++ -iquote /workspace main.cpp -o program ")
        assert (await command(machine, "ls /tmp/.build/*.o 2>/dev/null || true")).stdout == kept


@pytest.mark.parametrize("flags", [[], ["-Wall"]], ids=["without flags", "with flags"])
async def test_what_the_linker_does_not_find_is_an_error_as_from_gcc(machine, flags):
    code = "int elsewhere(int);\nint main() { return elsewhere(1); }"
    report = report_of(await run(machine, code, options={"flags": flags}))
    assert report.phase == "compile"
    assert "undefined reference to `elsewhere(int)'" in report.diagnostics
    assert report.diagnostics.endswith("collect2: error: ld returned 1 exit status\n")


@pytest.mark.parametrize("flags", [[], ["-Wall"]], ids=["without flags", "with flags"])
async def test_what_the_assembler_refuses_is_an_error(machine, flags):
    result = await run(machine, 'int main() { asm("nonsense"); }', options={"flags": flags})
    assert (result.error.name, result.error.message) == ("CompileError", "g++ ended with exit code 1")
    assert "no such instruction" in report_of(result).diagnostics


@pytest.mark.parametrize("flag", ["-c", "-fsyntax-only"])
async def test_flags_that_produce_no_program_run_nothing(machine, flag):
    result = await run(machine, HELLO, options={"flags": [flag]})
    assert (result.finished.status, report_of(result).phase, result.stdout) == ("ok", "check", "")


@pytest.mark.parametrize("damage", ["ln -s /workspace $B", "echo > $B", "mkfifo $B", "mkdir $B; chmod 0 $B"])
async def test_whatever_replaces_the_build_directory_is_removed(machine, damage):
    await command(machine, f"touch kept; rm -rf $B; {damage}", env={"B": BUILD})
    result = await run(machine, HELLO)
    assert (result.finished.status, result.stdout) == ("ok", "hello\n")
    assert (await command(machine, "rm kept")).finished.status == "ok"


@pytest.mark.parametrize(
    "options", [{"flags": 5}, {"sanitize": 5}, {"stdin": 5}, {"memory_limit_mb": "x"}, {"cases": 5}]
)
async def test_options_that_make_no_sense_are_an_error_of_the_run(machine, options):
    result = await run(machine, HELLO, options=options)
    assert (result.error.name, result.finished.state) == ("CannotRun", "kept")


async def test_a_build_directory_nested_more_deeply_than_any_path_is_emptied(machine):
    nest = """
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
int main() {
    int folder = open("/tmp/.build", O_RDONLY);
    for (int depth = 0; depth < 3000; depth++) {
        if (mkdirat(folder, "nested", 0700)) return 1;
        int inner = openat(folder, "nested", O_RDONLY);
        close(folder);
        folder = inner;
    }
    return fchmod(folder, 0);
}
"""
    assert (await run(machine, nest)).finished.status == "ok"
    assert (await run(machine, HELLO)).stdout == "hello\n"
    assert (await command(machine, "ls /tmp/.build")).stdout.split() == ["main.cpp", "main.o", "main.s", "program"]


async def test_a_program_has_default_signal_handlers(machine):
    code = '#include <cstdlib>\nint main() { return system("yes | head -1"); }'
    result = await run(machine, code)
    assert (result.stdout, result.stderr) == ("y\n", "")


async def test_a_snippet_without_main_that_does_not_compile_is_an_error(machine):
    result = await run(machine, "int twice(int x) { return 2 * y; }")
    assert (result.finished.status, report_of(result).phase) == ("error", "compile")


async def test_workspace_files_can_be_included_and_read_and_stay(machine):
    await machine.write("/workspace/shape.h", b"inline int corners() { return 4; }")
    write = '#include "shape.h"\n#include <fstream>\nint main() { std::ofstream("corners.txt") << corners(); }'
    assert (await run(machine, write)).finished.status == "ok"
    read = '#include <fstream>\n#include <iostream>\nint main() { std::cout << std::ifstream("corners.txt").rdbuf(); }'
    assert (await run(machine, read)).stdout == "4"
    names = {entry.path for entry in (await machine.list("/workspace", recursive=True, max_entries=100)).entries}
    assert names == {"/workspace/shape.h", "/workspace/corners.txt"}


@pytest.mark.parametrize(
    ("end", "status", "exit_code", "signal"),
    [
        ("return 7;", "exited", 7, None),
        ("abort();", "killed", None, "SIGABRT"),
        ("*(volatile int*)1 = 1;", "killed", None, "SIGSEGV"),
        ("raise(SIGKILL);", "killed", None, "SIGKILL"),
    ],
)
async def test_a_program_that_fails_is_reported_with_its_exit_code_or_signal(machine, end, status, exit_code, signal):
    finished = (await run(machine, f"#include <csignal>\n#include <cstdlib>\nint main() {{ {end} }}")).finished
    assert (finished.status, finished.exit_code, finished.signal) == (status, exit_code, signal)
    assert finished.state == "kept"


async def test_flags_are_added_to_the_default_ones(machine):
    code = "#if !defined(WANTED) || !defined(__OPTIMIZE__) || __cplusplus != 202002L\n#error\n#endif\nint main() {}"
    result = await run(machine, code, options={"flags": ["-DWANTED", "-std=c++20"]})
    assert result.finished.status == "ok"


async def test_a_sanitizer_reports_the_line(machine):
    code = "int main(int count, char**) {\n  int* a = new int[2]();\n  return a[count + 1];\n}"
    result = await run(machine, code, options={"sanitize": ["address"]})
    assert "heap-buffer-overflow" in result.stderr
    assert "main.cpp:3" in result.stderr
    assert "AddressSanitizer: heap-buffer-overflow" in result.error.message


OVERFLOW = '#include <cstdio>\nint main() { int n = 0; scanf("%d", &n); printf("%d\\n", n + 2147483647); }'


async def test_a_finding_of_ubsan_is_not_ok_though_the_program_succeeds(machine):
    result = await run(machine, OVERFLOW, options={"sanitize": ["undefined"], "stdin": "1"})
    assert (result.finished.status, result.error.name) == ("error", "SanitizerFinding")
    assert result.error.message.startswith("main.cpp:2:")
    assert "signed integer overflow" in result.error.message
    assert "runtime error: signed integer overflow" in result.stderr


async def test_a_finding_of_a_sanitizer_is_a_verdict_of_its_own(machine):
    cases = [{"stdin": "0", "expected": "2147483647"}, {"stdin": "1"}]
    result = await run(machine, OVERFLOW, options={"sanitize": ["undefined"], "cases": cases})
    assert [case.verdict for case in report_of(result).cases] == ["passed", "sanitizer finding"]
    assert "signed integer overflow" in report_of(result).cases[1].stderr
    assert (result.error.name, result.error.message) == ("SanitizerFinding", "in 1 of 2 cases")


async def test_memory_that_cannot_be_allocated_is_the_memory_limit(machine):
    """As in QEMU, whose kernel refuses an allocation that is larger than the machine."""
    code = "#include <new>\nint main() { throw std::bad_alloc(); }"
    assert (await run(machine, code)).error.name == "MemoryLimitExceeded"


async def test_a_sanitizer_ignores_leaks(machine):
    code = "#include <cstdlib>\nvoid* volatile p;\nint main() { p = malloc(100); p = nullptr; }"
    assert (await run(machine, code, options={"sanitize": ["address"]})).finished.status == "ok"


@pytest.mark.parametrize("escape", ["", "setsid();", "setsid(); if (fork()) _exit(0);"])
async def test_what_a_program_leaves_running_ends_with_it(machine, escape):
    leave = """
#include <cstdio>
#include <unistd.h>
int main() {
    int up[2];
    char byte;
    if (pipe(up)) return 1;
    if (fork() == 0) {
        ESCAPE
        printf("%d", getpid());
        fflush(stdout);
        if (write(up[1], "x", 1) == 1) pause();
    }
    return read(up[0], &byte, 1) != 1;
}
"""
    child = (await run(machine, leave.replace("ESCAPE", escape))).stdout
    alive = f"#include <csignal>\nint main() {{ return kill({child}, 0) == 0; }}"
    assert (await run(machine, alive)).finished.status == "ok"


# ---------------------------------------------------------------- limits


async def test_a_program_that_exceeds_its_memory_limit_is_ended(machine):
    result = await run(machine, HOG, options={"memory_limit_mb": 64})
    assert result.error.name == "MemoryLimitExceeded"
    assert "more than 64 MB" in result.error.message
    assert (await run(machine, HELLO)).stdout == "hello\n"


@pytest.mark.parametrize(
    "escape",
    [
        "if (fork()) pause(); setsid(); if (fork()) _exit(0);",
        "if (fork()) pause(); setsid(); prctl(PR_SET_CHILD_SUBREAPER, 1); if (fork()) { setpgid(0, 0); pause(); }",
        "if (syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)) pause(); setsid(); if (fork()) _exit(0);",
    ],
    ids=["double fork", "subreaper", "siblings"],
)
async def test_no_process_of_a_program_escapes_the_memory_limit(machine, escape):
    """A process that has left its process group, lost its parent or is the program's sibling is still counted."""
    calls = "#include <sched.h>\n#include <signal.h>\n#include <sys/prctl.h>\n#include <sys/syscall.h>\n"
    escaped = calls + HOG.replace("int main() {", f"int main() {{ {escape}")
    result = await run(machine, escaped, options={"memory_limit_mb": 64})
    assert result.error.name == "MemoryLimitExceeded"


async def test_a_stopped_program_ends_and_the_kernel_stays(machine):
    result = await stop_when_it_has_spoken(machine, OBEDIENT, stdin="l")
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert end_of(report_of(result)).signal == "SIGINT"


async def test_a_program_that_ignores_an_interrupt_is_killed_and_the_kernel_stays(machine):
    result = await stop_when_it_has_spoken(machine, STUBBORN)
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert end_of(report_of(result)).signal == "SIGKILL"


async def test_a_compiler_can_be_stopped(machine):
    endless = "constexpr int f(long n) { int x = 0; for (long i = 0; i < n; ++i) x ^= i; return x; }"
    code = f"{endless}\nstatic_assert(f(1L << 40));\nint main() {{}}"
    flags = ["-fconstexpr-ops-limit=9223372036854775807", f"-fconstexpr-loop-limit={2**31 - 1}"]
    async with machine.run(RunCode(code, options={"flags": flags}, grace_s=HANG_S)) as events:
        await command(machine, "until cat /proc/[0-9]*/comm 2>/dev/null | grep -qx cc1plus; do sleep 0.1; done")
        await events.stop()
        result = Result([event async for event in events])
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert report_of(result).phase == "compile"


async def test_sanitizers_work_with_a_memory_limit_and_the_limit_holds():
    """As in gVisor and bubblewrap: a limit on address space would break every sanitized program."""
    async with agent_client(CPP, "--memory-mb", "256") as client:
        assert (await run(client, HELLO, options={"sanitize": ["address"]})).stdout == "hello\n"
        assert "more than 224 MB" in (await run(client, HOG)).error.message
        await client.write("/workspace/hello.cpp", HELLO.encode())
        build = "g++ -fsanitize=address hello.cpp -o hello && ./hello"
        assert (await run(client, build, kind="command")).stdout == "hello\n"


# ---------------------------------------------------------------- cases


async def test_every_case_gets_its_verdict(machine):
    orders = {
        "x": "passed",
        "m": "memory limit exceeded",
        "b": "memory limit exceeded",
        "a": "runtime error",
        "e": "runtime error",
        "k": "runtime error",
    }
    cases = await run_cases(
        machine, OBEDIENT, *({"stdin": order, "expected": order} for order in orders), memory_limit_mb=128
    )
    assert [case.verdict for case in cases] == list(orders.values())
    assert end_of(cases[3]).signal == "SIGABRT"
    assert (end_of(cases[4]).exit_code, cases[4].stderr) == (3, "no such luck\n")


async def test_a_case_that_hangs_or_prints_endlessly_exceeds_its_time_limit(machine):
    cases = await run_cases(machine, OBEDIENT, {"stdin": "l"}, {"stdin": "p", "expected": "p"}, case_timeout_s=0.3)
    assert [case.verdict for case in cases] == ["time limit exceeded"] * 2
    assert len(cases[1].stdout) < 16_000


async def test_white_space_at_the_ends_of_lines_and_of_the_output_does_not_count(machine):
    cases = await run_cases(
        machine,
        ECHO,
        {"stdin": "a  \nb\t\n\n\n", "expected": "a\nb"},
        {"stdin": "a\nb", "expected": "a \r\nb\n"},
        {"stdin": " a", "expected": "a"},
        {"stdin": "a b", "expected": "a  b"},
        {"stdin": "", "expected": ""},
        {"stdin": "anything"},
    )
    assert [case.verdict for case in cases] == ["passed"] * 2 + ["wrong output"] * 2 + ["passed", "ran"]
    assert cases[2].diff == 'line 1: expected "a", got " a"'
    assert cases[5].stdout == "anything"


async def test_a_hundred_cases_of_awkward_output_fit_into_one_report(machine):
    code = "#include <cstdio>\nint main() { for (int i = 0; i < 4000; ++i) putchar(i), fputc(-i, stderr); }"
    cases = await run_cases(machine, code, *({"expected": "something else"} for _ in range(100)))
    assert {case.verdict for case in cases} == {"wrong output"}
    assert all(case.stdout for case in cases)


async def test_stopping_leaves_the_remaining_cases_unrun(machine):
    cases = [{"stdin": "x"}, {"stdin": "l"}, {"stdin": "x"}]
    mark = 'FILE* f = fopen("begun", "a"); fputc(order, f); fclose(f);'
    code = OBEDIENT.replace("fflush(stdout);", f"fflush(stdout); {mark}")
    async with machine.run(RunCode(code, options={"cases": cases})) as events:
        while await size_of(machine, "/workspace/begun") < 2:
            await anyio.lowlevel.checkpoint()
        await events.stop()
        result = Result([event async for event in events])
    assert result.finished.status == "interrupted"
    assert [case.verdict for case in report_of(result).cases] == ["ran", "not run", "not run"]


async def test_output_that_is_too_long_to_compare_never_passes(machine):
    code = '#include <cstdio>\nint main() { printf("1%100000s", "and more"); }'
    (case,) = await run_cases(machine, code, {"expected": "1"})
    assert (case.verdict, case.diff) == ("wrong output", "the output is much longer than expected")


async def test_half_a_surrogate_pair_in_a_case_is_replaced(machine):
    (case,) = await run_cases(machine, ECHO, {"stdin": "\ud800", "expected": "\udfff"})
    assert (case.verdict, case.stdout) == ("wrong output", "?")


async def test_a_fork_bomb_in_a_case_leaves_no_process(machine):
    bomb = "#include <unistd.h>\nint main() { for (;;) fork(); }"
    cases = await run_cases(machine, bomb, {}, {"stdin": "1"}, case_timeout_s=0.2)
    assert [case.verdict for case in cases] == ["time limit exceeded"] * 2
    assert (await run(machine, HELLO)).stdout == "hello\n"


async def size_of(machine: AgentClient, path: str) -> int:
    try:
        return (await machine.read(path, limit=1)).size
    except RequestRefused:
        return 0


# ---------------------------------------------------------------- warm-up


async def test_warm_up_code_that_does_not_compile_is_reported_with_the_error():
    async with agent_client(None) as client:
        with pytest.raises(RequestRefused, match="expected primary-expression"):
            await client.warm(WarmUp(language="cpp", code="int main() { return }"), LIMIT_S)
