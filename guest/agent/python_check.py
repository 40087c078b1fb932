"""Starts a zygote, if the Python it runs in is fit for kernels.

That Python may be any version that an image contains, so nothing here is newer than 3.6: annotations are quoted.
"""

import importlib.util
import json
import os
import socket
import sys

from guest.places import AGENT_PYTHON

SOCKET_FD = 3
OLDEST = (3, 11)
# Runs this module. The path to our code is an argument, because PYTHONPATH belongs to the image and the user's code.
START = "import sys; sys.path.insert(1, sys.argv.pop(1)); from guest.agent.python_check import main; main()"


def python_for(language: str) -> "list[str]":
    """Return the interpreter for a language's kernels, with its options.

    Python code runs in the image's Python. All other kernels are our own programs and run in the agent's.
    """
    if language != "python":
        return [sys.executable, "-I"]  # PYTHON* variables are meant for the image's Python
    if sys.executable == AGENT_PYTHON:
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, "python3")  # noqa: PTH118
            if folder.startswith("/") and os.access(path, os.X_OK):
                return [path]
    return [sys.executable]


def unfit(language: str) -> "str | None":
    """Return why kernels of a language cannot run in this Python; None if they can."""
    if language != "python":
        return None
    if sys.executable == AGENT_PYTHON:
        return "this image has no python3 on its PATH; install one, or choose another language in template.toml"
    if sys.version_info < OLDEST:
        version, oldest = (".".join(map(str, numbers)) for numbers in (sys.version_info[:3], OLDEST))
        return f"this image's python3 is {version}, and code needs {oldest} or newer"
    if importlib.util.find_spec("IPython") is None:
        return "this image's python3 has no IPython; add `RUN pip install ipython` to its Dockerfile"
    return None


def main() -> None:
    """Become the zygote, or report why not."""
    problem = unfit(sys.argv[2])
    if problem is not None:
        report = json.dumps({"event": "warmed", "error": problem})
        socket.socket(fileno=SOCKET_FD).send(report.encode())
        raise SystemExit(1)
    from guest.agent.zygote import main

    main()
