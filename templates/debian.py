"""The base layer of a machine: a small Debian with Python, as one tar file."""

import os
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates import apt
from templates.model import DebianSource
from templates.tools import StepFailed, Tools

BASE_TAR = "base.tar"
RECIPE = 4  # raise it when a change here must reach machines that are already built

# The agent and every kernel need Python with its whole standard library, compiled wheels the library of C++.
# There is no apt: a machine that is offline cannot use it.
BASE_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")

# Run last. What mmdebstrap keeps of where packages came from names the host's mirror, and would in a layer on top take
# the place of the layer's own.
_FORGET_SOURCES = 'rm -f "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap'

# Nobody reads manuals in a sandbox. Licences stay.
_DPKG_OPTIONS = (
    "force-unsafe-io",  # the tree is thrown away if anything goes wrong
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)


def base_inputs(suite: str) -> dict[str, Any]:
    """What the base layer of a suite depends on."""
    return {"recipe": RECIPE, "suite": suite, "packages": BASE_PACKAGES, "dpkg": _DPKG_OPTIONS}


def layer_inputs(base_key: str, source: DebianSource) -> dict[str, Any] | None:
    """What the layer of a template on top of a base depends on; None if it adds nothing."""
    if not source.packages and not source.run:
        return None
    return {"recipe": RECIPE, "base": base_key, "packages": sorted(set(source.packages)), "run": source.run}


async def make_base(tools: Tools, staging: Path, suite: str) -> dict[str, Any]:
    """Install the smallest Debian that has Python into `staging`/base.tar."""
    await _mmdebstrap(tools, staging, suite, BASE_PACKAGES, "--variant=essential")
    return {}


async def make_layer(tools: Tools, staging: Path, source: DebianSource, base_tar: Path) -> dict[str, Any]:
    """Install packages on top of a base that is already made and run commands in it; the result is a whole base."""
    await _mmdebstrap(
        tools,
        staging,
        source.suite,
        # dpkg is there already, but the variant "custom" refuses to work without it being named.
        ("dpkg", *source.packages),
        "--variant=custom",
        "--skip=check/empty",
        f"--setup-hook=tar-in {shlex.quote(str(base_tar))} /",
        *(f'--customize-hook=chroot "$1" sh -ec {shlex.quote(command)}' for command in source.run),
    )
    return {}


async def _mmdebstrap(tools: Tools, staging: Path, suite: str, packages: Sequence[str], *options: str) -> None:
    sources = staging / "debian.sources"
    text = _sources(suite, packages)
    if text is not None:
        sources.write_text(text)
    await tools.run(
        [
            "mmdebstrap",
            *options,
            f"--include={','.join(packages)}",
            '--aptopt=Acquire::Languages "none"',
            # Packages called like golang-go/trixie come from there; what they need only if the suite has none of it.
            f'--aptopt=APT::Default-Release "/^{suite}(|-updates|-security)$/"',
            *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
            f"--customize-hook={_FORGET_SOURCES}",
            suite,
            str(staging / BASE_TAR),
            *([str(sources)] if text is not None else []),
        ],
        # As root it mounts things on this host, and forgets them when it is killed.
        together=True,
        env={"TMPDIR": str(staging)} if os.geteuid() == 0 else None,
    )
    sources.unlink(missing_ok=True)
    whole = staging / "whole.tar"
    (staging / BASE_TAR).rename(whole)
    await anyio.to_thread.run_sync(_copy_without_devices, whole, staging / BASE_TAR)
    whole.unlink()


def _sources(suite: str, packages: Sequence[str]) -> str | None:
    """Where the packages come from: the suite, and others that packages are named to be of."""
    others = {name.partition("/")[2] for name in packages} - {"", suite}
    texts = [apt.sources_for(wanted) for wanted in (suite, *sorted(others))]
    if all(text is None for text in texts) and not others:
        return None
    if None in texts:
        raise StepFailed(f"only on Debian with its own package sources can packages of {', '.join(others)} be had")
    return "\n".join(text for text in texts if text)


def _copy_without_devices(source: Path, target: Path) -> None:
    """Leave out /dev: ordinary users cannot unpack devices, and machines get theirs from their own kernel.

    `tar --delete` would do the same, but it damages archives with extended headers.
    """
    with tarfile.open(source, "r:") as old, tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            if not member.name.startswith(("./dev/", "dev/")):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
