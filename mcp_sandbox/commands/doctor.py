"""Examine this host and report how it can run sandboxes. `doctor_view` prints the report."""

import getpass
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
import psutil

from mcp_sandbox.app import Drivers
from mcp_sandbox.commands.doctor_report import (
    ChoiceReport,
    DriverReport,
    HomeReport,
    HostReport,
    MissingReport,
    NetworkReport,
    Report,
    ServerReport,
    TemplateReport,
)
from mcp_sandbox.commands.doctor_web import examine_web
from mcp_sandbox.commands.next_steps import NEXT_STEPS
from mcp_sandbox.commands.sandbox import ask_all
from mcp_sandbox.commands.setup import INSTALL, driver_needs, make_plan
from mcp_sandbox.config import AUTO, Settings, config_files
from mcp_sandbox.errors import TooWeak
from mcp_sandbox.machines.choice import Choice, choose
from mcp_sandbox.machines.provider import CPUS
from mcp_sandbox.operating.control import Request
from templates.build import Builder
from templates.catalogue import CatalogueEntry
from templates.errors import TemplateError
from templates.model import Template
from templates.store import Entry, Store
from vmm.driver import DRIVERS, driver_info
from vmm.errors import DriverUnavailable, VmmError
from vmm.limits import detect
from vmm.network.nat import nat_trouble
from vmm.types import Isolation, NetworkMode, Probe

MB = 1_000_000
BUILD_BYTES = 3000 * MB  # disk space that a build needs at its peak: base, unpacked tree, image, snapshot
_MACHINES = {
    Isolation.VM: "microVMs",
    Isolation.KERNEL: "processes, each with its own application kernel",
    Isolation.NAMESPACE: "processes in namespaces on the host's kernel",
}


async def examine(settings: Settings, *, ask_web: bool = False) -> Report:
    """Probe this host; this takes seconds when KVM is tried for the first time.

    With `ask_web`, a machine is started that asks every search provider. Otherwise there is no traffic.
    """
    listed = list(settings.catalogue.entries())
    async with Drivers(settings) as drivers:
        named = () if settings.driver == AUTO else (settings.driver,)
        probes = {name: await _probe(drivers, name) for name in dict.fromkeys((*DRIVERS, *named))}
        choice, refusal = await _choice(settings, probes)
        usable = [entry.template for entry in listed if entry.template]
        templates = [await _template(drivers, choice.driver, template) for template in usable]
    missing = [
        MissingReport(what=need.what, package=need.package, purpose=need.purpose, when=need.when)
        for need in make_plan(settings, choice.driver).missing
    ]
    reports = [_driver(settings, name, probe, choice.driver) for name, probe in probes.items()]
    default = next((template for template in templates if template.default), None)
    broken = {entry.name: entry for entry in listed if entry.error}
    ready, verdict, next_step = judge(
        next(report for report in reports if report.in_force), default, missing, settings.template
    )
    if default is None and settings.template in broken:
        verdict, next_step = f"Not ready: template {settings.template} has errors", "fix the errors shown below"
    if refusal is not None:
        ready, verdict, next_step = False, f"Not ready: {refusal}", " ".join(NEXT_STEPS[refusal.code])
    host, home = _host(), _home(settings, drivers.store)
    return Report(
        version=version("mcp-sandbox"),
        ready=ready,
        verdict=verdict,
        next_step=next_step,
        warnings=[*_warnings(host, home, default), *_nat_troubles(settings), *map(_errors, broken.values())],
        choice=_choice_report(settings, choice),
        drivers=reports,
        host=host,
        network=_network(settings, choice.driver),
        home=home,
        settings=config_files(),
        guest_kernel=_guest_kernel(drivers.builder),
        templates=templates,
        web=await examine_web(settings, ask=ask_web),
        servers=await anyio.to_thread.run_sync(_servers, settings),
        missing=missing,
    )


def _servers(settings: Settings) -> list[ServerReport]:
    return [ServerReport.model_validate(stats) for stats in ask_all(settings, Request(do="stats")).values()]


async def _probe(drivers: Drivers, name: str) -> Probe:
    """Probe a driver; one that cannot be loaded or probed is not usable."""
    try:
        return await drivers.probe(name)
    except DriverUnavailable as error:
        return Probe(usable=False, reason=str(error), fix=error.fix)
    except (VmmError, TemplateError, OSError) as error:
        return Probe(usable=False, reason=str(error))


async def _choice(settings: Settings, probes: Mapping[str, Probe]) -> tuple[Choice, TooWeak | None]:
    """Return the chosen driver and None, or the driver of the settings and why it is refused."""

    async def known(name: str) -> Probe:
        return probes[name]

    try:
        return await choose(settings, known), None
    except TooWeak as refusal:
        return Choice(settings.driver, (f"driver = {settings.driver}",), probes[settings.driver]), refusal


def _choice_report(settings: Settings, choice: Choice) -> ChoiceReport:
    return ChoiceReport(
        driver=choice.driver,
        setting=settings.driver,
        min_isolation=settings.min_isolation,
        reasons=list(choice.reasons),
        better=choice.better,
    )


def judge(
    driver: DriverReport, template: TemplateReport | None, missing: Sequence[MissingReport], wanted: str
) -> tuple[bool, str, str | None]:
    """Return whether this host is ready, a sentence that names the first obstacle, and the next step."""
    needed_now = [need for need in missing if need.when == "run"]
    if template is not None and not template.built:
        needed_now = list(missing)
    if needed_now:
        names = ", ".join(need.what for need in needed_now)
        return False, f"Not ready: {names} {'is' if len(needed_now) == 1 else 'are'} not installed", "mcp-sandbox setup"
    if not driver.usable:
        return False, f"Not ready: {driver.name} does not work on this host: {one_line(driver.reason)}", driver.fix
    if template is None:
        return (
            False,
            f"Not ready: there is no template {wanted!r}",
            "set `template` to one that `mcp-sandbox template list` shows",
        )
    if not template.built:
        step = f"mcp-sandbox template build {template.name}"
        return False, f"Not ready: template {template.name} is not built, or its build is stale", step
    machines = _MACHINES[driver.isolation] if driver.isolation else "machines"
    return True, f"Ready: sandboxes run as {machines} ({driver.name}, {CPUS[driver.accel]})", None


def one_line(text: str) -> str:
    """Return the first line of a text, and an ellipsis if there are more."""
    lines = text.strip().splitlines() or [""]
    return f"{lines[0].rstrip()} …" if len(lines) > 1 else lines[0]


def _driver(settings: Settings, name: str, verdict: Probe, in_force: str) -> DriverReport:
    return DriverReport(
        name=name,
        in_force=name == in_force,
        usable=verdict.usable,
        isolation=driver_info(name).capabilities.isolation if name in DRIVERS else None,
        accel=verdict.accel,
        version=verdict.version,
        program=verdict.program,
        features=list(verdict.features),
        reason=verdict.reason,
        fix=_fix(settings, name, verdict),
        missing_protections=list(verdict.missing_protections),
    )


def _fix(settings: Settings, name: str, verdict: Probe) -> str | None:
    """Return what would make a driver usable, or better."""
    lacks = {need.package for need in make_plan(settings, name).missing if need in driver_needs(name)}
    if verdict.usable or not lacks:
        return verdict.fix
    return f"mcp-sandbox setup --driver {name} (or: {' '.join(INSTALL)} {' '.join(sorted(filter(None, lacks)))})"


def _guest_kernel(builder: Builder) -> Path | None:
    with suppress(TemplateError):  # shown in the drivers' reports
        kernel = builder.find_kernel()
        return kernel.vmlinuz if kernel else None
    return None


async def _template(drivers: Drivers, driver: str, template: Template) -> TemplateReport:
    stored = _size(drivers.builder.entries_of(template))
    report = _unknown(template, drivers.settings).model_copy(update={"stored_bytes": stored})
    try:
        built = await drivers.builder.find(template, drivers.load(driver))
    except (VmmError, TemplateError):  # shown in the driver's report
        return report
    if built is None:
        return report.model_copy(update={"built": False})
    snapshot = drivers.store.entry(built.snapshot.path).size_bytes if built.snapshot else None
    sizes = {"image_bytes": drivers.store.entry(built.root.parent).size_bytes, "snapshot_bytes": snapshot}
    return report.model_copy(update={"built": True, **sizes})


def _unknown(template: Template, settings: Settings) -> TemplateReport:
    return TemplateReport(
        name=template.name,
        title=template.title,
        default=template.name == settings.template,
        built=None,
        image_bytes=None,
        snapshot_bytes=None,
        stored_bytes=0,
        memory_mb=template.machine.memory_mb,
    )


def _size(entries: Iterable[Entry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _host() -> HostReport:
    memory = psutil.virtual_memory()
    hierarchy = detect()
    user = str(os.geteuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return HostReport(
        user=user,
        root=os.geteuid() == 0,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        cgroup_version=hierarchy.version,
        cgroup=hierarchy.describe(),
    )


def _network(settings: Settings, driver: str) -> NetworkReport:
    nat = settings.allow_nat and not _nat_troubles(settings)
    enabled = {NetworkMode.NONE: True, NetworkMode.PROXY: settings.network.enabled, NetworkMode.NAT: nat}
    possible = driver_info(driver).capabilities.networks if driver in DRIVERS else ()
    modes = [mode for mode in NetworkMode if enabled[mode] and mode in possible]
    return NetworkReport(modes=modes, allow_domains=list(settings.network.allow_domains))


def _nat_troubles(settings: Settings) -> list[str]:
    """Return why no sandbox can have network mode nat, although the settings allow it."""
    trouble = nat_trouble() if settings.allow_nat else None
    return [trouble] if trouble else []


def _home(settings: Settings, store: Store) -> HomeReport:
    path = settings.home
    existing = next(place for place in (path, *path.parents) if place.is_dir())
    return HomeReport(path=path, used_bytes=_size(store.entries()), free_bytes=shutil.disk_usage(existing).free)


def _errors(broken: CatalogueEntry) -> str:
    return f"template {broken.name} has errors:\n{broken.error}"


def _warnings(host: HostReport, home: HomeReport, template: TemplateReport | None) -> Iterator[str]:
    if template is None:
        return
    if host.memory_available_bytes < template.memory_mb * MB:
        available = f"{host.memory_available_bytes / MB:.0f} MB of memory are available"
        yield f"only {available}; a sandbox of {template.name} may use {template.memory_mb} MB"
    if not template.built and home.free_bytes < BUILD_BYTES:
        free = f"{home.free_bytes / MB:.0f} MB are free in {home.path}"
        yield f"only {free}; a build needs about {BUILD_BYTES / MB:.0f} MB"
