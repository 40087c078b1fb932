"""The report of `mcp-sandbox doctor`: what is in it.

`mcp-sandbox doctor --json` prints a `Report`; its keys are the field names below and stay as they are:

    version, ready, verdict, next_step, warnings[]
    choice       driver (the one in force), setting, min_isolation, reasons[], better (a step towards a better one)
    drivers[]    name, in_force, usable, isolation, accel, version, reason, fix, missing_protections[]
    host         user, root, cpus, memory_bytes, memory_available_bytes, cgroup_version, cgroup
    home         path, used_bytes, free_bytes
    guest_kernel path, or null if it was not fetched yet; only drivers with isolation "vm" need one
    templates[]  name, title, default, built, image_bytes, snapshot_bytes, stored_bytes, memory_mb
    servers[]    pid, uptime_s, sandboxes, pools[] (template, ready, starting, hits, misses, failed, last_error)
    missing[]    what, package (null: no package brings it), purpose, when ("run": no sandbox without it; "build")

Sizes are bytes on disk: images and snapshots have holes, which take no room. `ready` means that a sandbox of the
default template can be started now; the exit status is 0 exactly then.
"""

from pathlib import Path

from pydantic import BaseModel

from vmm.types import Accel, Isolation


class ChoiceReport(BaseModel):
    """Which driver is in force, and what led to it."""

    driver: str
    setting: str
    min_isolation: str
    reasons: list[str]
    better: str | None


class DriverReport(BaseModel):
    """One way to run machines, and whether it works here."""

    name: str
    in_force: bool
    usable: bool
    isolation: Isolation | None
    accel: Accel | None
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


class PoolReport(BaseModel):
    """What a running server keeps ready of one template."""

    template: str
    ready: int
    starting: int
    hits: int
    misses: int
    failed: int
    last_error: str | None


class ServerReport(BaseModel):
    """A server of this home that answers."""

    pid: int
    uptime_s: float
    sandboxes: int
    pools: list[PoolReport]


class Report(BaseModel):
    """All there is to say."""

    version: str
    ready: bool
    verdict: str
    next_step: str | None
    warnings: list[str]
    choice: ChoiceReport
    drivers: list[DriverReport]
    host: HostReport
    home: HomeReport
    guest_kernel: Path | None
    templates: list[TemplateReport]
    servers: list[ServerReport]
    missing: list[MissingReport]
