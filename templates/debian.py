"""Build a small Debian with Python as a tar file, and layers of packages on top of it."""

import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates import apt_sources
from templates.model import DebianSource
from templates.namespaces import Private
from templates.private_apt import release_pattern
from templates.tools import StepFailed, Tools

BASE_TAR = "base.tar"
RECIPE = 4  # part of the cache key: raise it when a change here requires a rebuild
LAYER_RECIPE = 5  # the same for layers

# The agent and all kernels need Python with its whole standard library; compiled wheels need the C++ library.
# There is no apt: sandboxes are offline.
BASE_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")

# Runs last. mmdebstrap leaves files that name the host's mirror and would override the sources of a layer on top.
_FORGET_SOURCES = 'rm -f "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap'

# Leave out documentation; keep licences.
_DPKG_OPTIONS = (
    "force-unsafe-io",  # a failed build is discarded anyway
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)


def base_inputs(suite: str) -> dict[str, Any]:
    """Return the inputs of a suite's base."""
    return {"recipe": RECIPE, "suite": suite, "packages": BASE_PACKAGES, "dpkg": _DPKG_OPTIONS}


def layer_inputs(base_key: str, source: DebianSource) -> dict[str, Any] | None:
    """Return the inputs of a template's layer on top of a base; None if it needs none."""
    if not source.packages and not source.run:
        return None
    return {"recipe": LAYER_RECIPE, "base": base_key, "packages": sorted(set(source.packages)), "run": source.run}


async def make_base(tools: Tools, staging: Path, suite: str) -> dict[str, Any]:
    """Write `staging`/base.tar: a minimal Debian with Python."""
    await _mmdebstrap(tools, staging, suite, BASE_PACKAGES, "--variant=essential")
    return {}


async def make_layer(tools: Tools, staging: Path, source: DebianSource, base_tar: Path) -> dict[str, Any]:
    """Write `staging`/base.tar: a base with more packages and the results of the template's commands."""
    await _mmdebstrap(
        tools,
        staging,
        source.suite,
        # The base has dpkg already, but mmdebstrap's variant "custom" insists that it is named.
        ("dpkg", *source.packages),
        "--variant=custom",
        "--skip=check/empty",
        f"--setup-hook=tar-in {shlex.quote(str(base_tar))} /",
        # Packages with alternatives, such as Java's, fail to install without it.
        '--setup-hook=mkdir -p "$1"/usr/share/man/man1',
        *(f'--customize-hook=chroot "$1" env HOME=/root sh -ec {shlex.quote(command)}' for command in source.run),
        visible=(base_tar,),
    )
    return {}


async def _mmdebstrap(
    tools: Tools, staging: Path, suite: str, packages: Sequence[str], *options: str, visible: tuple[Path, ...] = ()
) -> None:
    sources = staging / "debian.sources"
    text = sources_of(suite, packages)
    if text is not None:
        sources.write_text(text)
    await tools.run(
        [
            "mmdebstrap",
            "--mode=root",  # in its namespaces an ordinary user is root, too
            *options,
            f"--include={','.join(packages)}",
            '--aptopt=Acquire::Languages "none"',
            # A package written golang-go/trixie comes from there; its dependencies only if the suite lacks them.
            f'--aptopt=APT::Default-Release "{release_pattern(suite)}"',
            *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
            f"--customize-hook={_FORGET_SOURCES}",
            suite,
            str(staging / BASE_TAR),
            *([str(sources)] if text is not None else []),
        ],
        # It mounts file systems, and leaves them mounted when it is killed.
        private=Private(staging / "scratch", (staging, *visible)),
        env={"HOME": "/tmp"},  # noqa: S108 - private to it, and in the image cleaned up
    )
    sources.unlink(missing_ok=True)
    whole = staging / "whole.tar"
    (staging / BASE_TAR).rename(whole)
    await anyio.to_thread.run_sync(_copy_without_devices, whole, staging / BASE_TAR)
    whole.unlink()


def sources_of(suite: str, packages: Sequence[str]) -> str | None:
    """Return the apt sources of the suite and of the other suites that packages name."""
    others = {name.partition("/")[2] for name in packages} - {"", suite}
    texts = [apt_sources.sources_for(wanted) for wanted in (suite, *sorted(others))]
    if all(text is None for text in texts) and not others:
        return None
    if None in texts:
        raise StepFailed(
            f"packages of {', '.join(others)} can only be installed on a Debian host that uses Debian's package sources"
        )
    return "\n".join(text for text in texts if text)


def _copy_without_devices(source: Path, target: Path) -> None:
    """Copy a tar file without /dev: ordinary users cannot unpack devices, and the guest kernel creates its own.

    `tar --delete` damages archives with extended headers.
    """
    with tarfile.open(source, "r:") as old, tarfile.open(target, "w:", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            if not member.name.startswith(("./dev/", "dev/")):
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
