"""The templates of further languages in real machines, if they are built: building them takes minutes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_sandbox.app import Host, open_service
from mcp_sandbox.runs.requests import Case, CodeRun, CommandRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunView
from tests.functional.machines import only
from tests.waiting import HANG_S

pytestmark = [pytest.mark.vm, only("gvisor"), pytest.mark.anyio]

OWNER = "test"


class Box:
    """One sandbox."""

    def __init__(self, service: SandboxService, sandbox_id: str) -> None:
        self._service = service
        self._id = sandbox_id

    async def run(self, code: str, timeout_s: float = HANG_S, **options: object) -> RunView:
        with anyio.fail_after(2 * HANG_S):
            return await self._service.run(CodeRun(OWNER, code, self._id, timeout_s=timeout_s, **options))  # type: ignore[arg-type]

    async def command(self, command: str) -> RunView:
        with anyio.fail_after(HANG_S):
            return await self._service.run(CommandRun(OWNER, command, self._id, timeout_s=HANG_S))


@asynccontextmanager
async def sandbox(host: Host, template: str) -> AsyncIterator[Box]:
    """Create a sandbox of a template, or skip the test if the template is not built."""
    if await host.builder.find(host.settings.catalogue.load(template), host.driver) is None:
        pytest.skip(f"template {template} is not built: mcp-sandbox --driver gvisor template build {template}")
    async with open_service(host, pooled=False) as service:
        yield Box(service, (await service.create(OWNER, template)).sandbox_id)


def values(run: RunView) -> list[str]:
    return [display.data["text/plain"] for display in run.displays if "text/plain" in display.data]


async def test_javascript_keeps_variables_strips_types_and_survives_interrupts(host: Host):
    async with sandbox(host, "javascript") as box:
        assert values(await box.run("const kept: number[] = [1, 2]; await Promise.resolve(kept)")) == ["[ 1, 2 ]"]
        stopped = await box.run("for (;;);", timeout_s=1)
        assert (stopped.timed_out_after_s, stopped.state) == (1, "kept")
        assert values(await box.run("kept.length")) == ["2"]
        assert "v24" in (await box.command("node --version && npm --version")).stdout.head
        hungry = await box.run("const all = []; for (;;) all.push(new Array(1e5).fill(Math.random()));")
        assert hungry.error is not None
        assert hungry.error.name == "MemoryLimitExceeded"
        assert values(await box.run("typeof kept")) == ["'undefined'"]


async def test_two_clones_of_javascript_draw_different_random_numbers(host: Host):
    draw = "[Math.random(), require('crypto').randomUUID()]"
    async with sandbox(host, "javascript") as one, sandbox(host, "javascript") as other:
        first, second = [values(await box.run(draw))[0].split(",") for box in (one, other)]
    assert first[0] != second[0]
    assert first[1] != second[1]


async def test_r_keeps_variables_draws_plots_and_survives_interrupts(host: Host):
    async with sandbox(host, "r") as box:
        first = await box.run("x <- c(1, 2, 3)\nprint('é')\nmean(x)")
        assert (first.status, first.stdout.head, values(first)) == ("ok", '[1] "é"\n', ["[1] 2"])
        stopped = await box.run("repeat {}", timeout_s=1)
        assert (stopped.timed_out_after_s, stopped.state) == (1, "kept")
        drawn = await box.run("plot(x); library(ggplot2); ggplot(data.frame(x), aes(x)) + geom_histogram(bins = 3)")
        assert drawn.status == "ok", drawn
        assert [image.mime_type for image in drawn.images] == ["image/png", "image/png"]
        failed = await box.run("f <- function(a) stop('boo')\nf(1)")
        assert failed.error is not None
        assert (failed.error.name, failed.error.message) == ("Error", "boo")
        assert "f(1)" in failed.error.traceback
        assert values(await box.run("readLines(file('stdin'))", stdin="a\nb\n")) == ['[1] "a" "b"']
        left = await box.run("quit(status = 4)")
        assert (left.status, left.exit_code, left.state) == ("exited", 4, "kept")


async def test_two_clones_of_r_draw_different_random_numbers(host: Host):
    async with sandbox(host, "r") as one, sandbox(host, "r") as other:
        assert values(await one.run("runif(1)")) != values(await other.run("runif(1)"))


async def test_java_runs_cases_in_as_much_memory_as_it_has(host: Host):
    code = """
import java.util.*;
public class Doubler {
    static int depth(int n) { return n == 0 ? 0 : 1 + depth(n - 1); }
    public static void main(String[] args) {
        int n = new Scanner(System.in).nextInt();
        if (n < 0) { var all = new ArrayList<byte[]>(); while (true) all.add(new byte[1 << 20]); }
        System.out.println(2 * n + depth(100000) - 100000);
    }
}
"""
    async with sandbox(host, "java") as box:
        cases = (Case("4", "8"), Case("5", "11"), Case("x"), Case("-1"))
        run = await box.run(code, cases=cases)
        assert run.report is not None
        assert run.report.kind == "compiled"
        verdicts = [case.verdict for case in run.report.cases]
        assert verdicts == ["passed", "wrong output", "runtime error", "memory limit exceeded"], run.report
        wrong = await box.run("class Main { int f() { return } }")
        assert wrong.error is not None
        assert wrong.error.name == "CompileError"


async def test_bash_has_the_usual_programs(host: Host):
    async with sandbox(host, "bash") as box:
        names = (
            "awk bc curl file find git jq less make nc openssl ps python3 rsync sed sqlite3 tree unzip wget xz zip zstd"
        )
        run = await box.run(
            f"shopt -s nullglob; for name in {names}; do command -v $name >/dev/null || echo $name; done"
        )
        assert (run.status, run.stdout.head, run.stderr.head) == ("ok", "", "")
