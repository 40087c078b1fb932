"""What this host can do for sandboxes, as one `doctor_report.Report`. `doctor_view` shows it."""

import getpass
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread

from mcp_sandbox.app import Drivers
from mcp_sandbox.commands.doctor_report import (
    ChoiceReport,
    DriverReport,
    HomeReport,
    HostReport,
    MissingReport,
    Report,
    ServerReport,
    TemplateReport,
)
from mcp_sandbox.commands.sandbox import ask_all
from mcp_sandbox.commands.setup import INSTALL, driver_needs, make_plan
from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.errors import TooWeak
from mcp_sandbox.machines.choice import Choice, choose
from mcp_sandbox.machines.provider import CPUS
from mcp_sandbox.operating.control import Request
from templates.build import Builder
from templates.catalogue import CatalogueEntry
from templates.errors import TemplateError
from templates.model import Template
from templates.store import Entry
from vmm.driver import DRIVERS, driver_info
from vmm.errors import DriverUnavailable, VmmError
from vmm.limits import detect
from vmm.types import Isolation, Probe

MB = 1_000_000
BUILD_BYTES = 3000 * MB  # free room a build takes at its peak: base, unpacked tree, image, snapshot
_MACHINES = {
    Isolation.VM: "microVMs",
    Isolation.KERNEL: "processes with an application kernel of their own",
    Isolation.NAMESPACE: "processes in namespaces, on the host's kernel",
}


async def examine(settings: Settings) -> Report:
    """Probe this host; takes seconds when KVM has to be tried for the first time."""
    listed = list(settings.catalogue.entries())
    async with Drivers(settings) as drivers:
        named = () if settings.driver == AUTO else (settings.driver,)
        verdicts = {name: await _ask(drivers, name) for name in dict.fromkeys((*DRIVERS, *named))}
        choice, refusal = await _choice(settings, verdicts)
        usable = [entry.template for entry in listed if entry.template]
        templates = [await _template(drivers, choice.driver, template) for template in usable]
    plan = make_plan(settings, choice.driver)
    missing = [
        MissingReport(what=need.what, package=need.package, purpose=need.purpose, when=need.when)
        for need in plan.missing
    ]
    home = HomeReport(path=settings.home, used_bytes=_size(drivers.store.entries()), free_bytes=_free(settings.home))
    host, kernel = _host(), _guest_kernel(drivers.builder)
    reports = [_driver(settings, name, verdict, choice.driver) for name, verdict in verdicts.items()]
    default = next((template for template in templates if template.default), None)
    in_force = next(report for report in reports if report.in_force)
    ready, verdict, next_step = judge(in_force, default, missing, settings.template)
    broken = {entry.name: entry for entry in listed if entry.error}
    if default is None and settings.template in broken:
        verdict, next_step = f"Not ready: template {settings.template} cannot be used", "mend it as told below"
    if refusal is not None:
        ready, verdict, next_step = False, f"Not ready: {refusal}", None
    return Report(
        version=version("mcp-sandbox"),
        ready=ready,
        verdict=verdict,
        next_step=next_step,
        warnings=[*_warnings(host, home, default), *map(_mistakes, broken.values())],
        choice=ChoiceReport(
            driver=choice.driver,
            setting=settings.driver,
            min_isolation=settings.min_isolation,
            reasons=list(choice.reasons),
            better=choice.better,
        ),
        drivers=reports,
        host=host,
        home=home,
        guest_kernel=kernel,
        templates=templates,
        servers=await anyio.to_thread.run_sync(_servers, settings),
        missing=missing,
    )


def _servers(settings: Settings) -> list[ServerReport]:
    return [ServerReport.model_validate(stats) for stats in ask_all(settings, Request(do="stats")).values()]


async def _ask(drivers: Drivers, name: str) -> Probe:
    """A driver's verdict; one that cannot even be asked is not usable."""
    try:
        return await drivers.ask(name)
    except DriverUnavailable as error:
        return Probe(usable=False, reason=str(error), fix=error.fix)
    except (VmmError, TemplateError, OSError) as error:
        return Probe(usable=False, reason=str(error))


async def _choice(settings: Settings, verdicts: Mapping[str, Probe]) -> tuple[Choice, str | None]:
    """The driver in force, or the one that was refused and why."""

    async def known(name: str) -> Probe:
        return verdicts[name]

    try:
        return await choose(settings, known), None
    except TooWeak as refusal:
        return Choice(settings.driver, (f"driver = {settings.driver}",), verdicts[settings.driver]), str(refusal)


def judge(
    driver: DriverReport, template: TemplateReport | None, missing: Sequence[MissingReport], wanted: str
) -> tuple[bool, str, str | None]:
    """Ready or not, in one sentence, and the next step towards it. The first obstacle is the one to name."""
    needed_now = [need for need in missing if need.when == "run"]
    if template is not None and not template.built:
        needed_now = list(missing)
    if needed_now:
        names = ", ".join(need.what for need in needed_now)
        return False, f"Not ready: {names} {'is' if len(needed_now) == 1 else 'are'} not installed", "mcp-sandbox setup"
    if not driver.usable:
        return False, f"Not ready: {driver.name} cannot run machines here: {one_line(driver.reason)}", driver.fix
    if template is None:
        return False, f"Not ready: there is no template {wanted!r}", "choose another one with MCP_SANDBOX_TEMPLATE"
    if not template.built:
        step = f"mcp-sandbox template build {template.name}"
        return False, f"Not ready: template {template.name} is not built for this host as it is now", step
    machines = _MACHINES[driver.isolation] if driver.isolation else "machines"
    return True, f"Ready: sandboxes run as {machines} ({driver.name}, {CPUS[driver.accel]})", None


def one_line(text: str) -> str:
    """The first line of a reason, for places that have room for no more."""
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
        reason=verdict.reason,
        fix=_fix(settings, name, verdict),
        missing_protections=list(verdict.limits),
    )


def _fix(settings: Settings, name: str, verdict: Probe) -> str | None:
    """What would make a driver better or usable at all. One whose programs are missing is set up by us."""
    lacks = {need.package for need in make_plan(settings, name).missing if need in driver_needs(name)}
    if verdict.usable or not lacks:
        return verdict.fix
    return f"mcp-sandbox setup --driver {name} (or: {' '.join(INSTALL)} {' '.join(sorted(filter(None, lacks)))})"


def _guest_kernel(builder: Builder) -> Path | None:
    with suppress(TemplateError):  # the drivers' reports say so
        kernel = builder.find_kernel()
        return kernel.vmlinuz if kernel else None
    return None


async def _template(drivers: Drivers, driver: str, template: Template) -> TemplateReport:
    stored = _size(drivers.builder.entries_of(template))
    report = _unknown(template, drivers.settings).model_copy(update={"stored_bytes": stored})
    try:
        built = await drivers.builder.find(template, drivers.load(driver))
    except (VmmError, TemplateError):  # the driver's report says so
        return report
    if built is None:
        return report.model_copy(update={"built": False})
    frozen = drivers.store.entry(built.snapshot.path).size_bytes if built.snapshot else None
    sizes = {"image_bytes": drivers.store.entry(built.root.parent).size_bytes, "snapshot_bytes": frozen}
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
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    hierarchy = detect()
    user = str(os.geteuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return HostReport(
        user=user,
        root=os.geteuid() == 0,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(meminfo["MemTotal"]) * 1024,
        memory_available_bytes=int(meminfo["MemAvailable"]) * 1024,
        cgroup_version=hierarchy.version,
        cgroup=hierarchy.describe(),
    )


def _free(directory: Path) -> int:
    """Room in `directory`, or in the one it would be made in."""
    place = next(path for path in (directory, *directory.parents) if path.is_dir())
    return shutil.disk_usage(place).free


def _mistakes(broken: CatalogueEntry) -> str:
    return f"template {broken.name} has errors:\n{broken.error}"


def _warnings(host: HostReport, home: HomeReport, template: TemplateReport | None) -> Iterator[str]:
    if template is None:
        return
    if host.memory_available_bytes < template.memory_mb * MB:
        available = f"{host.memory_available_bytes / MB:.0f} MB of memory are available"
        yield f"only {available}; a sandbox of {template.name} may take {template.memory_mb} MB"
    if not template.built and home.free_bytes < BUILD_BYTES:
        yield f"only {home.free_bytes / MB:.0f} MB are free in {home.path}; a build takes about {BUILD_BYTES / MB:.0f}"
