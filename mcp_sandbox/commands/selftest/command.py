"""Run the cases on this host, show progress, and print the results."""

import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.app import Host, open_host
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.selftest.cases import BASICS, BUG, SECURITY, Case
from mcp_sandbox.commands.selftest.compat import suites
from mcp_sandbox.commands.selftest.compat.material import fetch
from mcp_sandbox.commands.selftest.results import CaseResult, Report, Verdict
from mcp_sandbox.commands.selftest.subject import Subject, open_subject
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest, HostNotReady
from mcp_sandbox.serving.lifetime import run_command
from vmm.process_table import ProcessId, is_alive, tree_of

FILE_WIDTH = 140  # columns, if the output is not a terminal
COLOURS = {Verdict.HELD: "green", Verdict.BROKEN: "red", Verdict.FAILED: "red", Verdict.NOT_APPLICABLE: "dim"}

err = Console(stderr=True, highlight=False)


def main(settings: Settings, *, security: bool, compat: bool, only: str, as_json: bool) -> int:
    """Run the cases, print the report, and return an exit code: 0 only if everything holds."""

    async def tested() -> int:
        report = await examine(settings, security=security, compat=compat, only=only)
        if as_json:
            sys.stdout.write(report.model_dump_json(indent=2) + "\n")
        else:
            show(report)
        return 0 if report.passed else 1

    return report_errors(lambda: run_command(tested))


async def examine(settings: Settings, *, security: bool, compat: bool = False, only: str = "") -> Report:
    """Run the cases with `only` in their topic or name in sandboxes of the settings' driver and template.

    Raises:
        BadRequest: there is no such case.
        SandboxError, TemplateError, VmmError: this host has no sandbox to test.
    """
    results: list[CaseResult] = []
    machines: set[ProcessId] = set()
    cases: Sequence[Case] = SECURITY if security else BASICS
    with err.status("probing this host") as status:

        def progress(number: int, name: str) -> None:
            machines.update(tree_of(os.getpid())[1:])
            status.update(f"{number} of {len(cases)}: {name}")

        async with open_host(settings) as host:
            verdict, facts = host.choice.verdict, host.facts
            if facts is None:
                raise HostNotReady(verdict.reason, verdict.fix)
            async with open_subject(host) as subject:
                await subject.shared()  # raises if there is no sandbox to test
                if compat:
                    cases = await _compatibility(host, subject, status.update)
                cases = _chosen(cases, only)
                results += await run_cases(cases, subject, progress)
    results.append(_nothing_left(machines))
    return Report(
        template=settings.template,
        driver=facts.driver,
        isolation=facts.isolation,
        accel=facts.accel,
        missing_protections=list(facts.missing_protections),
        security=security,
        compat=compat,
        passed=all(result.verdict in (Verdict.HELD, Verdict.NOT_APPLICABLE) for result in results),
        cases=results,
    )


async def _compatibility(host: Host, subject: Subject, progress: Callable[[str], None]) -> tuple[Case, ...]:
    """Fetch what the checks of compatibility run, for the Python in the sandbox. Raises BadRequest."""
    debian = subject.template.source.debian
    if subject.template.language != "python" or debian is None:
        raise BadRequest(f"--compat needs a Python template made from Debian, and {subject.template.name} is none")
    version = await (await subject.shared()).command("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'")
    material = await fetch(host.store, debian.suite, version.stdout.head.strip(), progress)
    return suites.cases(material)


def _chosen(cases: Sequence[Case], only: str) -> list[Case]:
    chosen = [case for case in cases if only.lower() in f"{case.topic}: {case.name}".lower()]
    if not chosen:
        topics = ", ".join(dict.fromkeys(case.topic for case in cases))
        raise BadRequest(f"no case has {only!r} in its topic or name; the topics are: {topics}")
    return chosen


async def run_cases(cases: Sequence[Case], subject: Subject, progress: Callable[[int, str], None]) -> list[CaseResult]:
    """Run the cases one after the other."""
    results = []
    for number, case in enumerate(cases, 1):
        progress(number, case.name)
        results.append(await case.run(subject))
        if not err.is_terminal:
            err.print(f"{results[-1].verdict}: {case.name}", soft_wrap=True, markup=False)
    return results


def show(report: Report) -> None:
    """Print a table, and below it what to do about each case that does not hold."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    accel = f", {report.accel}" if report.accel else ""
    title = f"{report.driver}{accel}: {report.isolation} isolation, template {report.template}"
    table = Table("topic", "what must hold", Column("verdict", no_wrap=True), "detail", title=escape(title))
    topic = None
    for case in report.cases:
        verdict = f"[{COLOURS[case.verdict]}]{case.verdict}[/]"
        table.add_row("" if case.topic == topic else case.topic, case.name, verdict, escape(case.detail))
        topic = case.topic
    out.print(table)
    for protection in report.missing_protections:
        out.print(f"[yellow]![/] not in force: {escape(protection)}")
    bad = [case for case in report.cases if case.advice]
    for case in bad:
        out.print(f"[red]✗[/] {case.name}: {escape(case.advice or '')}")
    if not bad:
        out.print(f"[green]✓[/] [bold]{len(report.cases)} cases, nothing broken[/]")


def _nothing_left(machines: set[ProcessId]) -> CaseResult:
    left = [str(machine.pid) for machine in machines if is_alive(machine)]
    return CaseResult(
        topic="the end",
        name="nothing is left of the sandboxes",
        verdict=Verdict.BROKEN if left or not machines else Verdict.HELD,
        detail=f"processes {', '.join(left)} still run" if left else f"{len(machines)} processes ended",
        advice=BUG if left or not machines else None,
        seconds=0.0,
    )
