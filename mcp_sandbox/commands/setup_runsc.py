"""`mcp-sandbox setup --runsc`: use another gVisor than Debian's, if it has the right checksum and works here."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console

from mcp_sandbox.app import Drivers
from mcp_sandbox.commands.common import show_progress
from mcp_sandbox.config import Settings
from templates.chosen_program import is_address
from vmm.drivers.gvisor import INFO, RUNSC
from vmm.errors import DriverUnavailable

NONE = "none"  # back to Debian's
SHA512 = re.compile(r"[0-9a-f]{128}")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class WantedRunsc:
    """Which runsc to use: a path or an address and its checksum, or none, which means Debian's."""

    source: str
    sha512: str = ""

    @classmethod
    def parse(cls, settings: Settings, source: str, sha512: str | None, *, check: bool) -> Self:
        """Check the options of the command line; the message of a ValueError says what to do."""
        if check:
            raise ValueError("--check installs nothing. Leave out --runsc, or --check.")
        if settings.runsc is not None:
            raise ValueError(f"The setting runsc = {settings.runsc} is in force. Remove it first.")
        if not source:
            raise ValueError("--runsc needs a path, an address or none.")
        if source == NONE:
            if sha512:
                raise ValueError("--sha512 belongs to a path or an address, not to --runsc none.")
            return cls(NONE)
        if is_address(source) and not source.startswith("https://"):
            raise ValueError(f"--runsc {source}: only https:// addresses and paths are accepted.")
        if sha512 is None:
            raise ValueError(f"--runsc needs --sha512, the checksum that gVisor's makers publish. {_how(source)}")
        if not SHA512.fullmatch(digest := sha512.lower()):
            raise ValueError(f"--sha512 must be 128 hexadecimal digits. {_how(source)}")
        return cls(source if is_address(source) else str(Path(source).expanduser().absolute()), digest)


def _how(source: str) -> str:
    if is_address(source):
        return f"A release has it beside the program: curl -fsSL {source}.sha512"
    return f"A release has it in runsc.sha512, beside the program; for your own build: sha512sum {source}"


async def install_runsc(settings: Settings, wanted: WantedRunsc) -> None:
    """Copy a runsc into the store, try it, and use it from now on.

    Raises:
        BuildFailed: it cannot be read, or has another checksum.
        DriverUnavailable: it does not work on this host. The one that was used before stays in force.
    """
    with err.status("reading runsc") as status:
        async with Drivers(settings, partial(show_progress, status)) as drivers:
            await _install(drivers, wanted)


async def _install(drivers: Drivers, wanted: WantedRunsc) -> None:
    builder = drivers.builder
    before = builder.chosen.sha512_of(RUNSC)
    if wanted.source == NONE:
        builder.chosen.choose(RUNSC, None)
        out.print("The runsc of Debian is used again." if before else "The runsc of Debian is already used.")
    else:
        program = await builder.copy_program(RUNSC, wanted.source, wanted.sha512)
        verdict = await drivers.try_program(INFO.name, program)
        if not verdict.usable:
            await builder.remove_program(RUNSC, wanted.sha512)
            host_lacks = verdict.fix if verdict.program else None  # else only another runsc helps
            raise DriverUnavailable(f"{wanted.source} was not installed: {verdict.reason}", fix=host_lacks)
        builder.chosen.choose(RUNSC, wanted.sha512)
        out.print(f"gVisor's program is now {verdict.version}, from {wanted.source}.", soft_wrap=True, markup=False)
    if before != (wanted.sha512 or None):
        out.print("It needs its own snapshots: run `mcp-sandbox template build NAME` for each template you use,")
        out.print("and restart running servers.")
        if wanted.source != NONE:
            out.print("`mcp-sandbox setup --runsc none` goes back to Debian's.")
