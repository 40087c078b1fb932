"""Choose the topics and the drivers, measure them, and report."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from rich.console import Console

from guest.errors import GuestError, first_error
from mcp_sandbox.app import open_host
from mcp_sandbox.commands.bench import (
    calls,
    commands,
    compiling,
    connect,
    cpu,
    fetch,
    first,
    fork,
    hostile,
    http,
    idle,
    machines,
    modes,
    neighbour,
    pool,
    soak,
    startup,
    tunnel,
)
from mcp_sandbox.commands.bench.results import Findings, Part, Report, show
from mcp_sandbox.commands.bench.subject import FULL, QUICK, Plan, Subject
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.errors import BadRequest, HostNotReady, SandboxError, TemplateNotBuilt, TooWeak
from mcp_sandbox.serving.lifetime import run_command
from templates.model import Template
from vmm.driver import driver_infos
from vmm.errors import VmmError
from vmm.types import Capabilities

TOPIC_FAILURES = (SandboxError, VmmError, GuestError)

err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing to measure, and the drivers it applies to."""

    measure: Callable[[Subject], Awaitable[Findings]]
    applies_to: Callable[[Capabilities], bool]
    only_if_named: bool = False


def _all(_can: Capabilities) -> bool:
    return True


def _snapshots(can: Capabilities) -> bool:
    return can.snapshot


def _native_cpu(can: Capabilities) -> bool:
    return not can.boots_kernel  # a virtual machine may have an emulated CPU


TOPICS = {
    "restore": Topic(machines.measure, _snapshots),
    "startup": Topic(startup.measure, _snapshots),
    "calls": Topic(calls.measure, _all),
    "commands": Topic(commands.measure, _all),
    "connect": Topic(connect.measure, _all),
    "http": Topic(http.measure, _all),
    "neighbour": Topic(neighbour.measure, _all),
    "tunnel": Topic(tunnel.measure, _all),
    "hostile": Topic(hostile.measure, _native_cpu),  # what a virtual machine starts from has no archive of an agent
    "modes": Topic(modes.measure, _all),
    "fetch": Topic(fetch.measure, _all),
    "cpu": Topic(cpu.measure, _native_cpu),
    "compile": Topic(compiling.measure, _native_cpu),
    "pool": Topic(pool.measure, _snapshots),
    "first": Topic(first.measure, _snapshots),
    "fork": Topic(fork.measure, lambda can: _snapshots(can) and _native_cpu(can)),
    "idle": Topic(idle.measure, _all),
    "soak": Topic(soak.measure, _snapshots, only_if_named=True),
}


def main(
    settings: Settings, names: Collection[str], *, quick: bool, with_soak: bool, cycles: int | None, as_json: bool
) -> int:
    """Measure and print. A missed promise is no error, because hosts differ."""
    plan = replace(QUICK if quick else FULL, cycles=cycles)

    async def measure() -> int:
        show(await _bench(settings, choose_topics(names, with_soak=with_soak), plan), as_json=as_json)
        return 0

    return report_errors(lambda: run_command(measure))


def choose_topics(names: Collection[str], *, with_soak: bool) -> dict[str, Topic]:
    """Return the named topics, or all but those that take very long.

    Raises:
        BadRequest: there is no topic of that name.
    """
    for name in names:
        if name not in TOPICS:
            raise BadRequest(f"There is no benchmark {name!r}; choose among: {', '.join(TOPICS)}.")
    wanted = names or [name for name, topic in TOPICS.items() if not topic.only_if_named]
    return {name: topic for name, topic in TOPICS.items() if name in wanted or (with_soak and name == "soak")}


def drivers_for(topics: dict[str, Topic]) -> list[str]:
    """Return the drivers that at least one of the topics applies to."""
    return [
        info.name for info in driver_infos() if any(topic.applies_to(info.capabilities) for topic in topics.values())
    ]


async def _bench(settings: Settings, topics: dict[str, Topic], plan: Plan) -> Report:
    """Measure the driver that the settings name, or every driver that is ready on this host."""
    template = settings.catalogue.load(settings.template)
    drivers = drivers_for(topics) if settings.driver == AUTO else [settings.driver]
    parts: list[Part] = []
    missing: list[tuple[str, SandboxError]] = []
    for name in drivers:
        try:
            async with _open_subject(settings.model_copy(update={"driver": name}), template, plan) as subject:
                parts.append(await measure_driver(subject, topics))
        except (HostNotReady, TemplateNotBuilt, TooWeak) as error:
            missing.append((name, error))
    if not parts:
        raise missing[0][1]
    for name, reason in missing:
        _print(f"{name}: left out: {reason}")
        if isinstance(reason, TemplateNotBuilt):
            _print(f"  To measure it: mcp-sandbox --driver {name} template build")
    return Report(template.name, plan, parts)


@asynccontextmanager
async def _open_subject(settings: Settings, template: Template, plan: Plan) -> AsyncIterator[Subject]:
    """Probe a driver and find its build of the template.

    Raises:
        HostNotReady, TemplateNotBuilt, TooWeak: the driver cannot be measured.
    """
    with err.status("") as status:

        def progress(line: str) -> None:
            status.update(f"{settings.driver}: {line}")

        progress("probing this host")
        async with open_host(settings) as host:
            verdict, facts = host.choice.verdict, host.facts
            if facts is None:
                raise HostNotReady(verdict.reason, verdict.fix)
            built = await host.builder.find(template, host.driver)
            if built is None:
                raise TemplateNotBuilt(template.name)
            yield Subject(host, facts, built, plan, progress)


async def measure_driver(subject: Subject, topics: dict[str, Topic]) -> Part:
    """Measure all topics for one driver, and print a line after each. A topic that fails does not end the others."""
    findings = Findings()
    driver = subject.driver.name
    for name, topic in topics.items():
        if not topic.applies_to(subject.driver.capabilities):
            findings.left_out.append(f"{name} does not apply to this driver")
            _print(f"{driver}: {findings.left_out[-1]}")
            continue
        began = anyio.current_time()
        try:
            found = await topic.measure(subject)
        except Exception as error:  # the results of the other topics took minutes
            first = first_error(error)
            if not isinstance(first, TOPIC_FAILURES):
                raise
            findings.left_out.append(f"{name} could not be measured: {first}")
            _print(f"{driver}: {findings.left_out[-1]}")
        else:
            findings.add(found)
            kept = f"{found.kept} of {len(found.promises)} promises kept"
            _print(f"{driver}: {name} measured in {anyio.current_time() - began:.0f} s, {kept}")
    return Part(driver, subject.facts.accel, findings)


def _print(line: str) -> None:
    """Print a line on stderr: above the live display of a terminal, else by itself."""
    err.print(line, soft_wrap=True, markup=False)
