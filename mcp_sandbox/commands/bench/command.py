"""Which drivers are measured, and what about them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rich.console import Console

from guest.errors import GuestError
from mcp_sandbox.app import open_host
from mcp_sandbox.commands.bench import calls, compiling, cpu, fork, machines, pool, soak
from mcp_sandbox.commands.bench.results import Findings, Part, Report, show
from mcp_sandbox.commands.bench.subject import FULL, QUICK, Plan, Subject
from mcp_sandbox.commands.common import guarded
from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.errors import BadRequest, HostNotReady, SandboxError, TemplateNotBuilt, TooWeak, first_of
from mcp_sandbox.serving.lifetime import run_command
from templates.model import Template
from vmm.driver import driver_infos
from vmm.errors import VmmError
from vmm.types import Capabilities

MEASURED_FAILURES = (SandboxError, VmmError, GuestError)

err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing to measure, and the kind of driver it applies to."""

    measure: Callable[[Subject], Awaitable[Findings]]
    concerns: Callable[[Capabilities], bool]
    only_if_named: bool = False


def _all(_can: Capabilities) -> bool:
    return True


def _snapshots(can: Capabilities) -> bool:
    return can.snapshot


def _native_cpu(can: Capabilities) -> bool:
    return not can.boots_kernel  # a virtual machine may have an emulated CPU


TOPICS = {
    "restore": Topic(machines.measure, _snapshots),
    "calls": Topic(calls.measure, _all),
    "cpu": Topic(cpu.measure, _native_cpu),
    "compile": Topic(compiling.measure, _native_cpu),
    "pool": Topic(pool.measure, _snapshots),
    "fork": Topic(fork.measure, lambda can: _snapshots(can) and _native_cpu(can)),
    "soak": Topic(soak.measure, _snapshots, only_if_named=True),
}


def main(
    settings: Settings, names: Collection[str], *, quick: bool, soaked: bool, cycles: int | None, as_json: bool
) -> int:
    """Measure and print. A promise that is missed is no error: hosts differ, and people read the table."""
    plan = replace(QUICK if quick else FULL, cycles=cycles)

    async def measure() -> int:
        show(await _bench(settings, chosen(names, soaked=soaked), plan), as_json=as_json)
        return 0

    return guarded(lambda: run_command(measure))


def chosen(names: Collection[str], *, soaked: bool) -> dict[str, Topic]:
    """The topics people named, or all but those that take very long.

    Raises:
        SandboxError: there is none of that name.
    """
    for name in names:
        if name not in TOPICS:
            raise BadRequest(f"There is no benchmark {name!r}; choose among: {', '.join(TOPICS)}.")
    wanted = names or [name for name, topic in TOPICS.items() if not topic.only_if_named]
    return {name: topic for name, topic in TOPICS.items() if name in wanted or (soaked and name == "soak")}


def concerned(topics: dict[str, Topic]) -> list[str]:
    """Return the drivers that at least one of the topics applies to."""
    return [info.name for info in driver_infos() if any(topic.concerns(info.capabilities) for topic in topics.values())]


async def _bench(settings: Settings, topics: dict[str, Topic], plan: Plan) -> Report:
    """Measure what concerns the driver that was named, or each one that is ready here."""
    template = settings.catalogue.load(settings.template)
    drivers = concerned(topics) if settings.driver == AUTO else [settings.driver]
    parts: list[Part] = []
    missing: list[tuple[str, SandboxError]] = []
    for name in drivers:
        try:
            async with _subject(settings.model_copy(update={"driver": name}), template, plan) as subject:
                parts.append(await measured(subject, topics))
        except (HostNotReady, TemplateNotBuilt, TooWeak) as error:
            missing.append((name, error))
    if not parts:
        raise missing[0][1]
    for name, why in missing:
        err.print(f"{name} is left out: {why}", soft_wrap=True)
        if isinstance(why, TemplateNotBuilt):
            err.print(f"  for this driver: mcp-sandbox --driver {name} template build")
    return Report(template.name, plan, parts)


@asynccontextmanager
async def _subject(settings: Settings, template: Template, plan: Plan) -> AsyncIterator[Subject]:
    """A driver with all that is needed to measure it.

    Raises:
        HostNotReady, TemplateNotBuilt, TooWeak: it cannot be.
    """
    with err.status("") as status:

        def tell(line: str) -> None:
            status.update(f"{settings.driver}: {line}")

        tell("looking at this host")
        async with open_host(settings) as host:
            verdict, facts = host.choice.verdict, host.facts
            if facts is None:
                raise HostNotReady(verdict.reason, verdict.fix)
            built = await host.builder.find(template, host.driver)
            if built is None:
                raise TemplateNotBuilt(template.name)
            yield Subject(host, facts, built, plan, tell)


async def measured(subject: Subject, topics: dict[str, Topic]) -> Part:
    """What the topics found about one driver. One that fails is told of, and the others go on."""
    findings = Findings()
    driver = subject.driver.name
    for name, topic in topics.items():
        if not topic.concerns(subject.driver.capabilities):
            findings.left_out.append(f"{name} does not concern it")
            continue
        try:
            findings.add(await topic.measure(subject))
        except Exception as error:  # what the other topics found is worth minutes
            first = first_of(error)
            if not isinstance(first, MEASURED_FAILURES):
                raise
            findings.left_out.append(f"{name} could not be measured: {first}")
    return Part(driver, subject.facts.accel, findings)
