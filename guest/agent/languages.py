"""Asks a machine which version of its language it has."""

import platform
import sys
from pathlib import Path

from guest.agent.python_check import python_for
from guest.languages import language as facts

_VERSION_TIMEOUT_S = 60.0  # on an emulated CPU


def version_of(language: str) -> str:
    """Return the version of a language in this machine."""
    command = facts(language).version
    if language == "python" and not Path(python := python_for(language)[0]).samefile(sys.executable):
        command = (python, "-c", "import platform; print(platform.python_version())")
    if not command:
        return platform.python_version()
    import subprocess  # not needed for the agent's own Python

    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.strip().partition("\n")[0].removeprefix("go").removeprefix("v")
