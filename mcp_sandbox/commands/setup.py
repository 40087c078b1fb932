"""`mcp-sandbox setup`: find out what this host lacks, and install it."""

import os
import pwd
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Column, Table

from mcp_sandbox.app import Drivers
from mcp_sandbox.commands.common import report_errors, show_progress
from mcp_sandbox.commands.setup_runsc import WantedRunsc, install_runsc
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady
from mcp_sandbox.machines.choice import Choice, choose
from mcp_sandbox.serving.lifetime import run_command
from templates.tools import LoggedTools, StepFailed, tail
from vmm.driver import DRIVERS, driver_info
from vmm.network.tables import NFT
from vmm.process import find_tool
from vmm.types import Accel, Need, Probe

LOG_NAME = "setup.log"
UPDATE = ("apt-get", "update")
INSTALL = ("apt-get", "install", "-y", "--no-install-recommends")
FIRST_ID, IDS = 100_000, 65_536  # the first subordinate id that Debian's useradd grants, and how many
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


NEEDS = (
    Need("unshare", "util-linux", "puts machines into namespaces", "run"),
    Need("setpriv", "util-linux", "drops the privileges of machines", "run"),
    Need("mmdebstrap", "mmdebstrap", "creates the root file system of a template", "build"),
    Need("mkfs.erofs", "erofs-utils", "packs it into an image", "build"),
    Need(KEYRING, "debian-archive-keyring", "verifies Debian packages", "build"),
)
FETCHING_NEEDS = (
    Need("apt-get", "apt", "fetches the guest kernel or gVisor", "build"),
    Need("dpkg", "dpkg", "unpacks fetched packages", "build"),
)
ORDINARY_USER_NEEDS = (Need("newuidmap", "uidmap", "lets ordinary users run mmdebstrap", "build"),)
IMAGE_NEEDS = (
    Need("skopeo", "skopeo", "fetches a template's OCI image", "build"),
    Need("buildah", "buildah", "builds a template's Dockerfile", "build"),
    *FETCHING_NEEDS,
)
NAT_NEEDS = (Need(NFT, "nftables", "filters what sandboxes with network mode nat reach", "run"),)
OWN_KERNEL_NEEDS = (Need("busybox", "busybox-static", "boots the kernel that guest_kernel names", "build"),)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is missing, and how to get it."""

    missing: tuple[Need, ...]
    grant_ids_to: str | None  # a user without subordinate ids
    first_free_id: int
    can_install: bool
    has_apt: bool

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the Debian packages that contain what is missing."""
        return tuple(dict.fromkeys(need.package for need in self.missing if need.package))

    @property
    def command(self) -> str:
        """Return a command line for root that installs everything."""
        parts = [" ".join(UPDATE), " ".join((*INSTALL, *self.packages))] if self.packages else []
        if self.grant_ids_to is not None:
            ids = f"{self.first_free_id}-{self.first_free_id + IDS - 1}"
            parts.append(f"usermod --add-subuids {ids} --add-subgids {ids} {self.grant_ids_to}")
        return " && ".join(parts)


def needs_of(driver: str, *, own_kernel: bool, root: bool, images: bool, nat: bool) -> Iterator[Need]:
    """Yield what the host needs to run and build sandboxes with this driver."""
    yield from driver_needs(driver)
    yield from NEEDS
    if own_kernel and driver in DRIVERS and driver_info(driver).capabilities.boots_kernel:
        yield from OWN_KERNEL_NEEDS
    if not root:
        yield from ORDINARY_USER_NEEDS
    if images:
        yield from IMAGE_NEEDS
    if nat:
        yield from NAT_NEEDS


def driver_needs(driver: str) -> tuple[Need, ...]:
    """Return what only this driver needs; nothing for an unknown one, which loading reports."""
    if driver not in DRIVERS:
        return ()
    info = driver_info(driver)
    return (*info.needs, *(FETCHING_NEEDS if info.downloads else ()))


def make_plan(settings: Settings, driver: str, *, images: bool = False) -> Plan:
    """Return what this host lacks for a driver; with `images` also what OCI images and Dockerfiles need."""
    root = os.geteuid() == 0
    own_kernel = settings.guest_kernel is not None
    wanted = needs_of(driver, own_kernel=own_kernel, root=root, images=images, nat=settings.allow_nat)
    missing = [need for need in dict.fromkeys(wanted) if not is_met(need)]
    grant_ids_to = None if root else _user_without_ids()
    if grant_ids_to is not None:
        purpose = f"lets {grant_ids_to} run mmdebstrap"
        missing.append(Need("an entry in /etc/subuid", None, purpose, "build"))
    has_apt = find_tool("apt-get") is not None
    return Plan(
        missing=tuple(missing),
        grant_ids_to=grant_ids_to,
        first_free_id=_first_free_id(),
        can_install=root and has_apt,
        has_apt=has_apt,
    )


def is_met(need: Need) -> bool:
    """Return whether this host has it."""
    if need.what.startswith("/"):
        return Path(need.what).is_file()
    program = find_tool(need.what)
    if program is None or need.what != "busybox":
        return program is not None
    return b"/ld-linux" not in Path(program).read_bytes()  # a machine has no libraries for a dynamic one


def _user_without_ids(etc: Path = Path("/etc")) -> str | None:
    """Return the name of this user if mmdebstrap would find no subordinate ids for it, else None."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container without an entry for its user
        name = str(os.geteuid())
    mine = (name, str(os.geteuid()))
    has_both = all(any(owner in mine for owner, _ in _granted(etc / file)) for file in ("subuid", "subgid"))
    return None if has_both else name


def _first_free_id(etc: Path = Path("/etc")) -> int:
    """Return the first id after all that are granted: users who share ids can access each other's processes."""
    return max((end for file in ("subuid", "subgid") for _, end in _granted(etc / file)), default=FIRST_ID)


def _granted(file: Path) -> Iterator[tuple[str, int]]:
    """Yield each user with subordinate ids, and the first id after them."""
    with suppress(OSError):
        for owner, first, count in re.findall(r"^([^:#\n]+):(\d+):(\d+)$", file.read_text(), re.MULTILINE):
            yield owner, int(first) + int(count)


def main(settings: Settings, *, check: bool, images: bool = False, runsc: WantedRunsc | None = None) -> int:
    """Install what is missing, or with `check` only print it; return an exit code. `runsc` is installed first."""

    async def set_up() -> int:
        if runsc is not None:
            await install_runsc(settings, runsc)
        return await _setup(settings, check=check, images=images)

    return report_errors(lambda: run_command(set_up))


class _Incomplete(Exception):
    """Something is missing that we cannot install. It was printed."""


async def _setup(settings: Settings, *, check: bool, images: bool) -> int:
    """Set up the driver of the settings, or one after the other, best first, until one works."""
    with err.status("examining this host") as status:
        async with Drivers(settings, partial(show_progress, status)) as drivers:

            async def check_driver(driver: str) -> Probe:
                plan = make_plan(settings, driver, images=images)
                if not plan.complete:
                    show(plan)
                    explain(plan)
                    raise _Incomplete
                verdict = await drivers.probe(driver)
                if verdict.lacks:
                    out.print(
                        f"The packages are installed. `mcp-sandbox setup` fetches what is missing: {verdict.lacks}."
                    )
                    raise _Incomplete
                return verdict

            async def set_up_driver(driver: str) -> Probe:
                drivers.load(driver)  # raises if there is no such driver
                if await _get_packages(partial(make_plan, settings, driver, images=images), settings, status):
                    await drivers.unload(driver)
                verdict = await drivers.fetch_and_probe(driver)
                if not verdict.usable:
                    err.print(f"[yellow]![/] {driver} is set up, but does not work: {escape(verdict.reason)}")
                return verdict

            async def get_driver(driver: str) -> Probe:
                unusable = await _without_program(drivers, driver)
                return unusable or await (check_driver if check else set_up_driver)(driver)

            try:
                choice = await choose(settings, get_driver)
            except _Incomplete:
                return 1
    return _conclude(choice)


async def _without_program(drivers: Drivers, driver: str) -> Probe | None:
    """Return why a driver has no program, if the operator installs that: then we install nothing else for it."""
    if driver not in DRIVERS or not driver_info(driver).by_hand:
        return None
    verdict = await drivers.probe(driver)
    return None if verdict.usable or verdict.program else verdict


def _conclude(choice: Choice) -> int:
    verdict = choice.verdict
    if not verdict.usable:
        raise HostNotReady(f"{choice.driver}: {verdict.reason}", verdict.fix)
    isolation = driver_info(choice.driver).capabilities.isolation
    out.print(f"Nothing is missing: {choice.driver} works on this host ({isolation} isolation).")
    if verdict.accel is Accel.KVM and choice.better:
        out.print(f"For a smaller monitor on this host's KVM: {choice.better}", soft_wrap=True, markup=False)
    return 0


async def _get_packages(look: Callable[[], Plan], settings: Settings, status: Status) -> bool:
    """Install the missing packages; return whether there were any.

    Raises:
        _Incomplete: something is still missing afterwards.
    """
    plan = look()
    if plan.complete:
        return False
    show(plan)
    if not plan.can_install:
        explain(plan)
        raise _Incomplete
    await _install(settings, plan.packages, status)
    left = look()
    if not left.complete:
        names = ", ".join(need.what for need in left.missing)
        err.print(f"[red]The packages are installed, but {names} is not on the PATH.[/]")
        raise _Incomplete
    return True


def show(plan: Plan) -> None:
    """Print what is missing and its purpose."""
    if plan.missing:
        table = Table(Column("missing", no_wrap=True), Column("Debian package", no_wrap=True), "purpose")
        for need in plan.missing:
            table.add_row(need.what, need.package or "", need.purpose)
        out.print(table)


def explain(plan: Plan) -> None:
    """Print what an administrator has to do."""
    if plan.has_apt:
        who = "As root, run" if os.geteuid() == 0 else "Ask an administrator to run"
        out.print(f"{who} this command, then try again:\n")
        out.print(f"  {plan.command}\n", soft_wrap=True, markup=False)
        return
    out.print(
        "This host has no apt-get. Install the programs listed above with its package manager; "
        "the packages may have other names."
    )


async def _install(settings: Settings, packages: Sequence[str], status: Status) -> None:
    log_path = settings.home / "logs" / LOG_NAME
    tools = LoggedTools(log_path, lambda line: status.update(f"installing · {escape(line[-90:])}"))
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        await tools.run(UPDATE, env=environment)
    except StepFailed as failure:  # often a third-party source that we do not need
        tools.note(f"{failure}; continuing with apt's old lists")
    try:
        await tools.run((*INSTALL, *packages), env=environment)
    except StepFailed as failure:
        err.print(f"[red]{escape(str(failure))}[/]\n{escape(tail(log_path))}\nLog: {log_path}")
        raise _Incomplete from failure
    err.print(f"[green]✓[/] installed {', '.join(packages)}")
