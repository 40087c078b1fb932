"""The templates for C++ and Go in real machines, through the service and the tools' text."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from mcp_types import TextContent

from mcp_sandbox.app import Host, open_service
from mcp_sandbox.runs.requests import Case, CodeRun, CommandRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.run_text import run_blocks
from tests.functional.machines import only
from tests.waiting import HANG_S

pytestmark = [pytest.mark.vm, only("gvisor"), pytest.mark.anyio]

LIMIT_S = HANG_S
OWNER = "test"
CPP = """
#include <bits/stdc++.h>
int main() { int n; std::cin >> n; if (n < 0) throw n; std::cout << 2 * n << "\\n"; }
"""
GO = """
import "fmt"

func main() {
    var n int
    fmt.Scan(&n)
    if n < 0 { panic(n) }
    fmt.Println(2 * n)
}
"""
CASES = (Case("4", "8"), Case("5", "11"), Case("-1"))


class Box:
    """One sandbox of a template."""

    def __init__(self, service: SandboxService, sandbox_id: str) -> None:
        self._service = service
        self._id = sandbox_id

    async def run(self, code: str, **options: Any) -> str:
        """Return the text that a model reads."""
        with anyio.fail_after(LIMIT_S):
            request = CodeRun(OWNER, code, self._id, timeout_s=LIMIT_S, **options)
            block = run_blocks(await self._service.run(request))[0]
        assert isinstance(block, TextContent)
        return block.text

    async def build(self, files: dict[str, str], command: str) -> str:
        """Write files and run a command in their directory."""
        for path, text in files.items():
            await self._service.write(OWNER, self._id, path, text.encode())
        with anyio.fail_after(LIMIT_S):
            request = CommandRun(OWNER, command, self._id, timeout_s=LIMIT_S)
            block = run_blocks(await self._service.run(request))[0]
        assert isinstance(block, TextContent)
        return block.text


@pytest.fixture(scope="module", params=["cpp-algorithm", "go-algorithm"])
async def box(request: pytest.FixtureRequest, host: Host, anyio_backend: str) -> AsyncIterator[Box]:
    await host.builder.build(host.settings.catalogue.load(request.param), host.driver)
    async with open_service(host, pooled=False) as service:
        yield Box(service, (await service.create(OWNER, request.param)).sandbox_id)


@pytest.fixture
def code(box: Box, request: pytest.FixtureRequest) -> str:
    return CPP if request.node.callspec.params["box"] == "cpp-algorithm" else GO


async def test_a_program_reads_its_input_and_is_measured(box: Box, code: str):
    text = await box.run(code, stdin="21")
    assert text.startswith("stdout:\n42\n")
    last_line = text.splitlines()[-1]
    assert last_line.startswith("[ok · compiled in ")
    assert " MB · sandbox " in last_line
    assert len(last_line) < 300  # models read it after every run


async def test_cases_are_judged_one_by_one(box: Box, code: str):
    text = await box.run(code, cases=CASES, memory_limit_mb=512)
    assert "cases: 1 passed, " in text
    assert "2: wrong output, " in text
    assert 'line 1: expected "11", got "10"' in text
    assert "3: runtime error, " in text


async def test_a_mistake_is_shown_with_its_line(box: Box, code: str):
    text = await box.run(code.replace("2 * n", "2 * m"))
    assert "CompileError" in text
    assert "main." in text
    assert "failed to compile after " in text


@pytest.mark.parametrize("box", ["cpp-algorithm"], indirect=True)
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ('#include <print>\nint main() { std::println("{:>4}", 42); }', "  42"),
        ('#include <bits/stdc++.h>\nint main() { std::jthread([] { std::cout << std::format("{}", 42); }); }', "42"),
        ("#include <bits/stdc++.h>\nusing namespace std;\nint main() { cout << chrono::seconds(42); }", "42s"),
        # It mentions no name that the core headers lack, and still needs one.
        (
            "#include <bits/stdc++.h>\n#define JOIN(a, b) a##b\n"
            'int main() { std::cout << std::JOIN(for, mat)("{}", 42); }',
            "42",
        ),
        # The better overload is std::clamp, which <iostream> has by way of <format>.
        (
            "#include <iostream>\nusing namespace std;\nlong clamp(long v, long, long) { return v; }\n"
            "int main() { cout << clamp(50, 0, 42); }",
            "42",
        ),
        ("#include <vector>\n#include <iostream>\nint main() { std::cout << std::vector<int>(42).size(); }", "42"),
        ('#include <cstdio>\nvoid print(int n) { printf("%d", n); }\nint main() { print(42); }', "42"),
    ],
)
async def test_a_program_may_use_all_of_the_standard_library(box: Box, code: str, shown: str):
    assert (await box.run(code)).startswith(f"stdout:\n{shown}\n")


@pytest.mark.parametrize("box", ["cpp-algorithm"], indirect=True)
async def test_messages_about_a_program_with_core_headers_are_shown_once(box: Box):
    warned = await box.run("#include <iostream>\n#warning look\nint main() { std::cout << 42; }")
    assert warned.count("#warning look [-Wcpp]") == 1
    wrong = await box.run("#include <iostream>\nint main() { std::cout << absent; }")
    assert wrong.count("was not declared in this scope") == 1
    assert "core-headers" not in wrong


async def test_a_program_that_takes_all_memory_ends_without_its_sandbox(box: Box, code: str):
    """The one in C++ does so in a process that has left its session and has lost its parent."""
    hungry = {
        CPP: "#include <unistd.h>\nint main() { if (fork()) pause(); setsid(); if (fork()) _exit(0);"
        "for (;;) { volatile char* p = new char[4096]; *p = 1; } }",
        GO: "var kept [][]byte\nfunc main() { for { kept = append(kept, append([]byte{1}, make([]byte, 4096)...)) } }",
    }
    assert "MemoryLimitExceeded: the program used more than 128 MB" in await box.run(hungry[code], memory_limit_mb=128)
    assert (await box.run(code, stdin="1")).startswith("stdout:\n2\n")


async def test_a_project_of_several_files_is_built_with_a_command(box: Box, code: str):
    projects = {
        CPP: (
            {
                "two.h": "int two();",
                "two.cpp": "int two() { return 2; }",
                "main.cpp": '#include <cstdio>\n#include "two.h"\nint main() { printf("%d\\n", two()); }',
                "Makefile": "two: two.o main.o\n\t$(CXX) $^ -o $@",
            },
            "make -s CXX=g++ && ./two",
        ),
        GO: (
            {
                "go.mod": "module two",
                "two/two.go": "package two\nfunc Two() int { return 2 }",
                "main.go": 'package main\nimport ("fmt"; "two/two")\nfunc main() { fmt.Println(two.Two()) }',
            },
            "go build -o /tmp/two . && /tmp/two",
        ),
    }
    assert (await box.build(*projects[code])).startswith("stdout:\n2\n")
