"""What this host can do for sandboxes, as one report. `doctor_view` shows it.

`mcp-sandbox doctor --json` prints a `Report`; its keys are the field names below and stay as they are:

    version, ready, verdict, next_step, warnings[]
    drivers[]    name, in_force, usable, isolation, accel, version, reason, fix, missing_protections[]
    host         user, root, cpus, memory_bytes, memory_available_bytes, cgroup_version, cgroup
    home         path, used_bytes, free_bytes
    guest_kernel path, or null if it was not fetched yet
    templates[]  name, title, default, built, image_bytes, snapshot_bytes, stored_bytes, memory_mb
    missing[]    what, package (null: no package brings it), purpose, when ("run": no sandbox without it; "build")

Sizes are bytes on disk: images and snapshots have holes, which take no room. `ready` means that a sandbox of the
default template can be started now; the exit status is 0 exactly then.
"""

import getpass
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel

from mcp_sandbox.app import Host, make_host
from mcp_sandbox.commands.setup import make_plan
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady
from templates.errors import TemplateError
from templates.model import Template, find_templates
from templates.store import Entry
from vmm.driver import DRIVER_NAMES
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
_CPUS = {"kvm": "KVM", "tcg": "emulated CPU: 16 to 27 times slower", None: "native CPU"}


class DriverReport(BaseModel):
    """One way to run machines, and whether it works here."""

    name: str
    in_force: bool  # the one the settings choose
    usable: bool
    isolation: str | None
    accel: str | None
    version: str | None
    reason: str
    fix: str | None
    missing_protections: list[str]


class HostReport(BaseModel):
    """This host, for this user."""

    user: str
    root: bool
    cpus: int
    memory_bytes: int
    memory_available_bytes: int  # a snapshot's memory is loaded into it, once for all its sandboxes
    cgroup_version: int | None
    cgroup: str


class HomeReport(BaseModel):
    """Where everything is kept."""

    path: Path
    used_bytes: int
    free_bytes: int


class TemplateReport(BaseModel):
    """One template, and what the store holds of it for the driver in force."""

    name: str
    title: str
    default: bool
    built: bool | None  # None: cannot be told while the driver is not usable
    image_bytes: int | None
    snapshot_bytes: int | None
    stored_bytes: int  # all there is of it, older snapshots included
    memory_mb: int


class MissingReport(BaseModel):
    """Something of the system's that is not installed."""

    what: str
    package: str | None
    purpose: str
    when: str


class Report(BaseModel):
    """All there is to say."""

    version: str
    ready: bool
    verdict: str
    next_step: str | None
    warnings: list[str]
    drivers: list[DriverReport]
    host: HostReport
    home: HomeReport
    guest_kernel: Path | None
    templates: list[TemplateReport]
    missing: list[MissingReport]


async def examine(settings: Settings) -> Report:
    """Probe this host; takes seconds when KVM has to be tried for the first time.

    Raises:
        TemplateError: a template's definition cannot be read.
    """
    chosen = DRIVER_NAMES[0] if settings.driver == "auto" else settings.driver
    drivers = [
        await _driver(settings, name, in_force=name == chosen) for name in dict.fromkeys((*DRIVER_NAMES, chosen))
    ]
    templates, kernel, used = await _stored(settings)
    plan = make_plan(settings)
    missing = [
        MissingReport(what=need.what, package=need.package, purpose=need.purpose, when=need.when)
        for need in plan.missing
    ]
    host, home = _host(), HomeReport(path=settings.home, used_bytes=used, free_bytes=_free(settings.home))
    in_force = next(driver for driver in drivers if driver.in_force)
    default = next((template for template in templates if template.default), None)
    ready, verdict, next_step = judge(in_force, default, missing, settings.template)
    return Report(
        version=version("mcp-sandbox"),
        ready=ready,
        verdict=verdict,
        next_step=next_step,
        warnings=list(_warnings(host, home, default)),
        drivers=drivers,
        host=host,
        home=home,
        guest_kernel=kernel,
        templates=templates,
        missing=missing,
    )


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
    machines = _MACHINES[Isolation(driver.isolation)] if driver.isolation else "machines"
    return True, f"Ready: sandboxes run as {machines} ({driver.name}, {_CPUS[driver.accel]})", None


def one_line(text: str) -> str:
    """The first line of a reason, for places that have room for no more."""
    lines = text.strip().splitlines() or [""]
    return f"{lines[0].rstrip()} …" if len(lines) > 1 else lines[0]


async def _driver(settings: Settings, name: str, *, in_force: bool) -> DriverReport:
    isolation: Isolation | None = None
    try:
        driver = make_host(settings.model_copy(update={"driver": name})).driver
        isolation = driver.capabilities.isolation
        try:
            probe = await driver.probe()
        finally:
            await driver.aclose()
    except DriverUnavailable as error:
        probe = Probe(usable=False, reason=str(error), fix=error.fix)
    except (HostNotReady, VmmError, TemplateError, OSError) as error:
        probe = Probe(usable=False, reason=str(error))
    return DriverReport(
        name=name,
        in_force=in_force,
        usable=probe.usable,
        isolation=isolation,
        accel=probe.accel,
        version=probe.version,
        reason=probe.reason,
        fix=probe.fix,
        missing_protections=list(probe.limits),
    )


async def _stored(settings: Settings) -> tuple[list[TemplateReport], Path | None, int]:
    """Templates, guest kernel and the size of the store."""
    try:
        host = make_host(settings)
    except (HostNotReady, VmmError, TemplateError):  # the driver's report says so
        return [_unknown(template, settings) for template in find_templates().values()], None, 0
    try:
        templates = [await _template(host, template) for template in find_templates().values()]
    finally:
        await host.driver.aclose()
    kernel = host.builder.find_kernel()
    return templates, kernel.vmlinuz if kernel else None, _size(host.store.entries())


async def _template(host: Host, template: Template) -> TemplateReport:
    stored = _size(host.builder.entries_of(template))
    report = _unknown(template, host.settings).model_copy(update={"stored_bytes": stored})
    try:
        built = await host.builder.find(template, host.driver)
    except VmmError:
        return report
    if built is None:
        return report.model_copy(update={"built": False})
    sizes = {
        "image_bytes": host.store.entry(built.root.parent).size_bytes,
        "snapshot_bytes": host.store.entry(built.snapshot.path).size_bytes if built.snapshot else None,
    }
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


def _warnings(host: HostReport, home: HomeReport, template: TemplateReport | None) -> Iterator[str]:
    if template is None:
        return
    if host.memory_available_bytes < template.memory_mb * MB:
        available = f"{host.memory_available_bytes / MB:.0f} MB of memory are available"
        yield f"only {available}; a sandbox of {template.name} may take {template.memory_mb} MB"
    if not template.built and home.free_bytes < BUILD_BYTES:
        yield f"only {home.free_bytes / MB:.0f} MB are free in {home.path}; a build takes about {BUILD_BYTES / MB:.0f}"
