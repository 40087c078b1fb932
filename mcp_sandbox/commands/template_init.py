"""`mcp-sandbox template init`: a template.toml to start from, with a comment for everything that can be said in one."""

import re
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from mcp_sandbox.commands.common import guarded
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest
from templates.catalogue import BUILT_IN, FILE_NAME, NAME
from templates.model import Language

SourceKind = Literal["debian", "oci", "dockerfile"]

DOCKERFILE = "Dockerfile"

err = Console(stderr=True, highlight=False)

_HEAD = """\
# A template says what is in a sandbox. What you can say here, and why: docs/templates.md
title = "{title}"
description = "What a model should know about it before it chooses it."
language = "{language}"  # what run_code takes: python, cpp, go or shell
# pool = "cold"  # keep no machine of it ready; each one is started when somebody asks

"""

# What a language cannot do without, from Debian. Compiled ones have it from the templates we ship, so that what was
# compiled ahead for those is shared.
_LIKE = {"cpp": "cpp-algorithm", "go": "go-algorithm"}
_DEBIAN = {
    "python": """\
[source.debian]
suite = "bookworm"  # or "trixie"
packages = []  # Debian packages, such as "graphviz"
wheels = [  # exact versions, so that a rebuild gives the same machine
  "ipython==9.18.1",  # run_code needs it
]
""",
    "shell": """\
[source.debian]
suite = "bookworm"  # or "trixie"
packages = ["jq"]  # whatever commands are to be there
""",
}

# With the registry: buildah knows short names for a few images only.
_IMAGES = {
    "python": "docker.io/library/python:3.13-slim",
    "cpp": "docker.io/library/gcc:14",
    "go": "docker.io/library/golang:1.24",
    "shell": "docker.io/library/debian:bookworm-slim",
}

_OCI = """\
[source]
# name:tag, name@sha256:…, or files: oci:DIR, oci-archive:FILE, docker-archive:FILE
oci = "{image}"{note}
"""

# Code in Python runs in the image's own. The image that a Dockerfile adds IPython to has none.
_WITH_IPYTHON = "docker.io/jupyter/base-notebook:python-3.11"
_NEEDS_IPYTHON = "  # run_code needs a python3 in it, 3.11 or newer, with IPython"

_BY_DOCKERFILE = f"""\
[source]
dockerfile = "{DOCKERFILE}"  # in this directory, which is also what COPY copies from
"""

_ADDED = {
    "python": "# run_code needs it\nRUN pip install --no-cache-dir ipython\n",
    "shell": "RUN apt-get update && apt-get install --yes --no-install-recommends jq && rm -rf /var/lib/apt/lists/*\n",
}

_TAIL = """\

[machine]
memory_mb = {memory_mb}
vcpus = 1
disk_mb = 1024  # room for what a sandbox writes

# What code, commands and the service find set.
[env]
# EXAMPLE = "value"
{env}
# Runs once, before the snapshot: every sandbox starts with it done.
[warmup]
code = \"""
\"""

# A process that is started before the snapshot, and is alive in every sandbox.
# [service]
# start_cmd = "exec python3 -m http.server 8000"
# ready_cmd = "python3 -c 'import socket; socket.create_connection((\\"localhost\\", 8000))'"  # succeeds when it serves
"""

_MEMORY_MB = {"python": 512, "cpp": 1024, "go": 1024, "shell": 256}


def init(settings: Settings, name: str, language: Language | None, source: SourceKind, directory: Path | None) -> int:
    """Write a new template, and say what comes next."""
    chosen: Language = language or ("python" if source == "debian" else "shell")

    def main() -> int:
        root = directory.absolute() if directory else settings.template_path[0]
        folder = write_template(root, name, chosen, source)
        err.print(f"Wrote {escape(str(folder / FILE_NAME))}.", soft_wrap=True)
        if root not in settings.template_path:
            shown = escape(str(root))
            err.print(f"[yellow]![/] {shown} is not on the search path: add it to template_path.", soft_wrap=True)
        err.print(f"Say in it what you need, then: mcp-sandbox template build {name}", soft_wrap=True)
        err.print(f"While you try things out: mcp-sandbox template build {name} --watch", soft_wrap=True)
        return 0

    return guarded(main)


def write_template(root: Path, name: str, language: Language, source: SourceKind) -> Path:
    """Make a directory with a template that can be built as it is.

    Raises:
        BadRequest: the name cannot be one, or there is something of that name.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a template's name. Use up to 63 lower-case letters, digits and hyphens.")
    folder = root / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BadRequest(f"{folder} exists already. Choose another name, or edit what is there.") from None
    if source == "dockerfile":
        (folder / DOCKERFILE).write_text(f"FROM {_IMAGES[language]}\n{_ADDED.get(language, '')}")
    (folder / FILE_NAME).write_text(text_of(name, language, source))
    return folder


def text_of(name: str, language: Language, source: SourceKind) -> str:
    """A template.toml with everything in it that can be said."""
    title = name.replace("-", " ").capitalize()
    sources = {
        "debian": _DEBIAN.get(language) or _table_of(language, "source.debian"),
        "oci": _oci(language),
        "dockerfile": _BY_DOCKERFILE,
    }
    tail = _TAIL.format(memory_mb=_MEMORY_MB[language], env=_variables(language, source))
    return _HEAD.format(title=title, language=language) + sources[source] + tail


def _oci(language: Language) -> str:
    if language == "python":
        return _OCI.format(image=_WITH_IPYTHON, note=_NEEDS_IPYTHON)
    return _OCI.format(image=_IMAGES[language], note="")


def _variables(language: Language, source: SourceKind) -> str:
    """What a language needs to be set; images bring their own."""
    return _table_of(language, "env").partition("\n")[2] if source == "debian" else ""


def _table_of(language: Language, table: str) -> str:
    """A table of the template we ship for a language, as it is written there; nothing if it has none."""
    if language not in _LIKE:
        return ""
    text = (BUILT_IN / _LIKE[language] / FILE_NAME).read_text()
    found = re.search(rf"^\[{re.escape(table)}\]\n.*?(?=\n*^\[|\n*\Z)", text, re.MULTILINE | re.DOTALL)
    return f"{found.group()}\n" if found else ""
