"""The report of `mcp-sandbox doctor`.

`mcp-sandbox doctor --json` prints a `Report`; its keys are the field names below and stay as they are:

    version, ready, verdict, next_step, warnings[]
    choice       driver (the selected one), setting, min_isolation, reasons[], better (what would allow a better one)
    drivers[]    name, in_force, usable, isolation, accel, version, program (path, or null), features[] (options that
                 not every release of the program has, and that are used), reason, fix, missing_protections[]
    host         user, root, cpus, memory_bytes, memory_available_bytes, cgroup_version, cgroup
    network      modes[] (that sandboxes can ask for), allow_domains[] (that they can reach in mode proxy)
    home         path, used_bytes, free_bytes
    settings[]   the files that settings were read from, most important first
    guest_kernel path, or null if it was not fetched; only drivers with isolation "vm" need one
    templates[]  name, title, default, built, image_bytes, snapshot_bytes, stored_bytes, memory_mb
    web          providers[] (name, answers: null if it was not asked, problem), problem
    servers[]    pid, uptime_s, sandboxes, pools[] (template, ready, starting, hits, misses, failed, last_error)
    missing[]    what, package (null: none contains it), purpose, when ("run": every sandbox needs it; "build")

Sizes are bytes on disk, without the holes of images and snapshots. `ready` means that a sandbox of the default template
can start now; only then the exit code is 0.
"""

from pathlib import Path

from pydantic import BaseModel

from vmm.types import Accel, Isolation, NetworkMode


class ChoiceReport(BaseModel):
    """The selected driver, and why."""

    driver: str
    setting: str
    min_isolation: str
    reasons: list[str]
    better: str | None


class DriverReport(BaseModel):
    """A driver, and whether it works on this host."""

    name: str
    in_force: bool
    usable: bool
    isolation: Isolation | None
    accel: Accel | None
    version: str | None
    program: Path | None
    features: list[str]
    reason: str
    fix: str | None
    missing_protections: list[str]


class HostReport(BaseModel):
    """This host, as this user may use it."""

    user: str
    root: bool
    cpus: int
    memory_bytes: int
    memory_available_bytes: int  # sandboxes of a snapshot share its memory
    cgroup_version: int | None
    cgroup: str


class NetworkReport(BaseModel):
    """What sandboxes can reach."""

    modes: list[NetworkMode]
    allow_domains: list[str]


class HomeReport(BaseModel):
    """The directory that contains everything."""

    path: Path
    used_bytes: int
    free_bytes: int


class TemplateReport(BaseModel):
    """A template, and its build for the selected driver."""

    name: str
    title: str
    default: bool
    built: bool | None  # None: unknown while the driver is not usable
    image_bytes: int | None
    snapshot_bytes: int | None
    stored_bytes: int  # including stale builds
    memory_mb: int


class MissingReport(BaseModel):
    """A program or file of the host that is missing."""

    what: str
    package: str | None
    purpose: str
    when: str


class PoolReport(BaseModel):
    """A running server's pool of one template."""

    template: str
    ready: int
    starting: int
    hits: int
    misses: int
    failed: int
    last_error: str | None


class ServerReport(BaseModel):
    """A running server of this home."""

    pid: int
    uptime_s: float
    sandboxes: int
    pools: list[PoolReport]


class SearchProviderReport(BaseModel):
    """A search provider that is set up."""

    name: str
    answers: bool | None = None  # None: it was not asked
    problem: str | None = None


class WebReport(BaseModel):
    """How the web tools can search."""

    providers: list[SearchProviderReport]
    problem: str | None = None  # why none of them could be asked


class Report(BaseModel):
    """The whole report."""

    version: str
    ready: bool
    verdict: str
    next_step: str | None
    warnings: list[str]
    choice: ChoiceReport
    drivers: list[DriverReport]
    host: HostReport
    network: NetworkReport
    home: HomeReport
    settings: list[Path]
    guest_kernel: Path | None
    templates: list[TemplateReport]
    web: WebReport
    servers: list[ServerReport]
    missing: list[MissingReport]
