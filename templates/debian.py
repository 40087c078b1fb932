"""Build a small Debian with Python as a tar file, and layers of packages on top of it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from templates import apt_sources
from templates.model import DebianSource
from templates.namespaces import Private
from templates.private_apt import release_pattern
from templates.tools import StepFailed, Tools

BASE_TAR = "base.tar"
RECIPE = 5  # part of the cache key: raise it when a change here requires a rebuild
LAYER_RECIPE = 6  # the same for layers

# The agent and all kernels need Python with its whole standard library; compiled wheels need the C++ library.
# There is no apt: sandboxes are offline. Without usr-is-merged, an essential package brings a program in all of Perl.
BASE_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "usr-is-merged")

# Runs last. mmdebstrap leaves files that name the host's mirror and would override the sources of a layer on top.
_FORGET_SOURCES = 'rm -f "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap'

# Leave out documentation; keep licences. A base has these options in a file, so they hold for layers, too. mmdebstrap
# must not know them: it would pass every package through a slow filter.
_DPKG_OPTIONS = (
    "force-unsafe-io",  # a failed build is discarded anyway
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)
_SET_DPKG_OPTIONS = (
    'mkdir -p "$1"/etc/dpkg/dpkg.cfg.d && '
    f"printf '%s\\n' {shlex.join(_DPKG_OPTIONS)} >\"$1\"/etc/dpkg/dpkg.cfg.d/mcp-sandbox"
)
# mmdebstrap unpacks the packages of a base before dpkg installs them, with everything.
_LEAVE_OUT = (
    'cd "$1"/usr/share && rm -rf info/* lintian/* locale/* man/* && '
    "find doc -type f ! -name copyright -delete && find doc -mindepth 1 -type d -empty -delete"
)
# The layout that usr-is-merged insists on.
_MERGE_USR = 'cd "$1" && for name in bin sbin lib lib64; do mkdir -p usr/$name && ln -s usr/$name $name; done'
# With mmdebstrap's own --include, packages would be unpacked twice.
_INSTALL = 'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get --yes --option DPkg::Chroot-Directory="$1" install'


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
    await _mmdebstrap(
        tools,
        staging,
        suite,
        BASE_PACKAGES,
        "--include=?essential",
        f"--include={','.join(BASE_PACKAGES)}",
        f"--setup-hook={_SET_DPKG_OPTIONS}",
        f"--setup-hook={_MERGE_USR}",
        f"--customize-hook={_LEAVE_OUT}",
    )
    return {}


async def make_layer(tools: Tools, staging: Path, source: DebianSource, base_tar: Path) -> dict[str, Any]:
    """Write `staging`/base.tar: a base with more packages and the results of the template's commands."""
    install = [f"--customize-hook={_INSTALL} {shlex.join(source.packages)}"] if source.packages else []
    await _mmdebstrap(
        tools,
        staging,
        source.suite,
        source.packages,
        "--include=dpkg",  # the base has it already, but mmdebstrap's variant "custom" insists that it is named
        "--skip=check/empty",
        # mmdebstrap's own tar-in copies the file through two pipes.
        f'--setup-hook=tar --extract --numeric-owner --file={shlex.quote(str(base_tar))} --directory="$1"',
        # Packages with alternatives, such as Java's, fail to install without it.
        '--setup-hook=mkdir -p "$1"/usr/share/man/man1',
        *install,
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
            "--variant=custom",
            "--skip=output/dev",  # ordinary users cannot unpack devices, and the guest kernel creates its own
            *options,
            '--aptopt=Acquire::Languages "none"',
            # A package written golang-go/trixie comes from there; its dependencies only if the suite lacks them.
            f'--aptopt=APT::Default-Release "{release_pattern(suite)}"',
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
