"""Makes what needs a network fail at once, and say what to do instead.

In a machine without a network a name is not found within milliseconds, but programs that install packages try again
and again, or are not there at all. So they are told not to look, and the names they are called by lead to a few
lines of shell: these let the program have its say, if there is one, and follow its failure with advice.
"""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH103, PTH118, PTH120

import os
import shutil
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from guest import offline
from guest.agent.session import quoted
from guest.offline.pip import ADVICE

SHIMS = "/run/mcp-sandbox/bin"
LIBRARY = os.path.dirname(offline.__file__)

VARIABLES: Mapping[str, str] = {
    "PIP_NO_INDEX": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_OFFLINE": "1",
    "CONDA_OFFLINE": "true",
    "npm_config_offline": "true",
    "GOPROXY": "off",
    "GOTOOLCHAIN": "local",
    "CARGO_NET_OFFLINE": "true",
}

_WHEELS, _PACKAGES, _ELSE = "wheels", "packages", "packages, or to a Dockerfile that is named"
_PIP = (_WHEELS, ("install", "download", "wheel"))
_APT = (_PACKAGES, ("install", "update", "upgrade"))
_CONDA = (_WHEELS, ("install", "create", "update"))
_NPM = (_ELSE, ("install", "i", "ci", "add", "update"))
# Programs that do little but install packages: they have an answer even where they are not there.
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
# Programs that do more than that: where they are not there, nobody should think they were.
TOOLS = {
    "go": (_ELSE, ("get", "install", "download", "tidy")),
    "cargo": (_ELSE, ("add", "install", "fetch")),
}

SCRIPT = """#!/bin/sh
real={real}
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
    """Let all that is started with this environment know that there is no network. What is set already stays."""
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
    path = environment.get("PATH", os.defpath)
    if SHIMS not in path.split(":"):
        with suppress(OSError):
            _write_shims(path)
            environment["PATH"] = f"{SHIMS}:{path}"
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
    """What stands before the program `real`, or in the place of one that is not there."""
    return SCRIPT.format(
        real=quoted(real),
        installs="|".join(f'*" {word} "*' for word in words),
        advice=quoted(f"{name}: {ADVICE.format(field=field)}"),
    )
