"""Makes programs that install packages fail at once, with advice.

In a machine without a network, looking up a name fails within milliseconds, but package managers retry, or are not
installed at all. So small shell scripts in front of PATH tell the program, if it exists, to stay offline, and print
advice if it fails. They do neither if the machine has a network, which is decided when it is leased.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH118, PTH120

import os
import shlex
import shutil
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from guest import offline
from guest.offline.pip import ADVICE, NETWORK
from guest.places import INSTALLED

SHIMS = "/run/mcp-sandbox/bin"
LIBRARY = os.path.dirname(offline.__file__)

# With a network, too.
VARIABLES: Mapping[str, str] = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",  # Debian means a system that others use, too
    "PIP_NO_CACHE_DIR": "1",  # files may be in memory
    "PYTHONUSERBASE": INSTALLED,  # the template's own directories are read-only
    "GOTOOLCHAIN": "local",
}
# The variable that keeps a program offline.
OFFLINE: Mapping[str, str] = {
    "pip": "PIP_NO_INDEX=1",
    "pip3": "PIP_NO_INDEX=1",
    "uv": "UV_OFFLINE=1",
    "conda": "CONDA_OFFLINE=true",
    "npm": "npm_config_offline=true",
    "yarn": "npm_config_offline=true",
    "go": "GOPROXY=off",
    "cargo": "CARGO_NET_OFFLINE=true",
}

_WHEELS, _PACKAGES, _ELSE = "wheels", "packages", "packages, or to a Dockerfile that is named"
_PIP = (_WHEELS, ("install", "download", "wheel"))
_APT = (_PACKAGES, ("install", "update", "upgrade"))
_CONDA = (_WHEELS, ("install", "create", "update"))
_NPM = (_ELSE, ("install", "i", "ci", "add", "update"))
# Programs that do little but install packages: their scripts exist even if they do not.
INSTALLERS = {
    "pip": _PIP,
    "pip3": _PIP,
    "apt": _APT,
    "apt-get": _APT,
    "conda": _CONDA,
    "npm": _NPM,
    "yarn": _NPM,
    "uv": (_WHEELS, ("install", "add", "sync")),
    "apk": (_ELSE, ("add", "update", "upgrade")),
    "gem": (_ELSE, ("install",)),
}
# Programs that do more: without them, there must be no script that looks like them.
TOOLS = {
    "go": (_ELSE, ("get", "install", "download", "tidy")),
    "cargo": (_ELSE, ("add", "install", "fetch")),
}

SCRIPT = """#!/bin/sh
real={real}
if [ -e {network} ]; then
    [ "$real" ] && exec "$real" "$@"
    echo {missing} >&2
    exit 127
fi
{stay_offline}
case " $* " in
    {installs}) ;;
    *) [ "$real" ] && exec "$real" "$@" ;;
esac
status=127
if [ "$real" ]; then
    "$real" "$@" && exit
    status=$?
fi
echo {advice} >&2
exit $status
"""


def go_offline(environment: MutableMapping[str, str]) -> None:
    """Put the scripts and the pip module in front of PATH and PYTHONPATH. Variables that are set already stay."""
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
    path = environment.get("PATH", os.defpath)
    if SHIMS not in path.split(":"):
        with suppress(OSError):
            _write_shims(path)
            environment["PATH"] = f"{SHIMS}:{path}:{INSTALLED}/bin"
    libraries = environment.get("PYTHONPATH", "").split(":")
    if LIBRARY not in libraries:
        environment["PYTHONPATH"] = ":".join([LIBRARY, *filter(None, libraries)])


def _write_shims(path: str) -> None:
    os.makedirs(SHIMS, exist_ok=True)
    for name, (field, words) in {**INSTALLERS, **TOOLS}.items():
        real = shutil.which(name, path=path)
        if real or name in INSTALLERS:
            shim = os.path.join(SHIMS, name)
            with open(shim, "w", opener=_executable) as file:
                file.write(script(name, real or "", field, words))


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o755)


def script(name: str, real: str, field: str, words: tuple[str, ...]) -> str:
    """Return the script in front of the program `real`, which is empty if the program does not exist."""
    variable, _, value = OFFLINE.get(name, "").partition("=")
    return SCRIPT.format(
        real=shlex.quote(real),
        network=NETWORK,
        stay_offline=f'export {variable}="${{{variable}-{value}}}"' if variable else "",
        installs="|".join(f'*" {word} "*' for word in words),
        missing=shlex.quote(f"{name}: this sandbox's template does not contain it"),
        advice=shlex.quote(f"{name}: {ADVICE.format(field=field)}"),
    )
