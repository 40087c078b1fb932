"""The first thing in a new zygote: says so if its Python is not fit for kernels, and else goes on.

That Python may be any that somebody put into an image. So nothing here is newer than 3.6: annotations are quoted.
"""

import importlib.util
import json
import os
import socket
import sys

from guest.places import AGENT_PYTHON

SOCKET_FD = 3
OLDEST = (3, 11)
# Makes this module the program: an image's own PYTHONPATH may be set, and is for the user's code.
START = "import sys; sys.path.insert(1, sys.argv.pop(1)); from guest.agent.birth import main; main()"


def python_for(language: str) -> "list[str]":
    """The interpreter for a language's kernels, with its options.

    Code in Python runs in the Python of the image. All other kernels are programs of ours, as the agent is.
    """
    if language != "python":
        return [sys.executable, "-I"]  # what the image wants of its own Python is not for ours
    if sys.executable == AGENT_PYTHON:
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, "python3")  # noqa: PTH118
            if folder.startswith("/") and os.access(path, os.X_OK):
                return [path]
    return [sys.executable]


def unfit(language: str) -> "str | None":
    """Why kernels of a language cannot run here; None if they can."""
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
    """Become the zygote, or say why not."""
    problem = unfit(sys.argv[2])
    if problem is not None:
        told = json.dumps({"event": "warmed", "error": problem})
        socket.socket(fileno=SOCKET_FD).send(told.encode())
        raise SystemExit(1)
    from guest.agent.zygote import main

    main()
