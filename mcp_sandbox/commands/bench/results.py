"""Results of a benchmark: figures, and promises checked against them."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Column, Table

from mcp_sandbox.commands.bench.subject import Plan

FILE_WIDTH = 140  # columns, if the output is not a terminal


@dataclass(frozen=True, slots=True)
class Figure:
    """The distribution of one measured quantity."""

    name: str
    unit: str
    samples: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Promise:
    """A promised limit and the value measured here. Ratios and differences carry over to other hosts; times do not."""

    text: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    kept: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.value >= self.limit if self.at_least else self.value <= self.limit)


@dataclass(slots=True)
class Findings:
    """All results about one driver."""

    figures: list[Figure] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # reasons, one per topic that was not measured

    @property
    def kept(self) -> int:
        """The number of promises kept."""
        return sum(promise.kept for promise in self.promises)

    def add(self, other: "Findings") -> None:
        self.figures += other.figures
        self.promises += other.promises
        self.left_out += other.left_out


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a report about one driver."""

    driver: str
    accel: str | None
    findings: Findings


@dataclass(frozen=True, slots=True)
class Report:
    """The output of `bench --json`."""

    template: str
    plan: Plan
    parts: list[Part]


def figure(name: str, unit: str, samples: Sequence[float]) -> Figure:
    """Summarise samples by their median and upper percentiles."""
    ordered = sorted(samples)
    p95, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.95, 0.99))
    return Figure(name, unit, len(ordered), statistics.median(ordered), p95, p99)


def show(report: Report, *, as_json: bool) -> None:
    """Print the figures, then the promises, then what was left out."""
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    for table in (_figures(report), _promises(report)):
        if table.row_count:
            console.print(table)
    for part in report.parts:
        for line in part.findings.left_out:
            console.print(f"{part.driver}: {line}")


def _figures(report: Report) -> Table:
    numbers = [Column(name, justify="right") for name in ("samples", "p50", "p95", "p99")]
    table = Table("driver", "measured", *numbers, title=f"template {report.template}")
    for part in report.parts:
        for entry in part.findings.figures:
            values = (f"{value:,.1f} {entry.unit}" for value in (entry.p50, entry.p95, entry.p99))
            table.add_row(_title(part), entry.name, str(entry.samples), *values)
    return table


def _promises(report: Report) -> Table:
    numbers = [Column(name, justify="right") for name in ("promised", "measured")]
    table = Table("driver", "promise", *numbers, "")
    for part in report.parts:
        for promise in part.findings.promises:
            promised = f"{'≥' if promise.at_least else '≤'} {promise.limit:g} {promise.unit}".strip()
            measured = f"{promise.value:,.2f} {promise.unit}".strip()
            verdict = "[green]kept[/]" if promise.kept else "[red]missed[/]"
            table.add_row(_title(part), promise.text, promised, measured, verdict)
    return table


def _title(part: Part) -> str:
    return f"{part.driver} ({part.accel})" if part.accel else part.driver
