"""`mcp-sandbox template init`: write a commented template.toml to start from."""

import re
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from guest.languages import NAMES, LanguageName
from guest.languages import language as facts
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest
from mcp_sandbox.private import users_umask
from templates.catalogue import BUILT_IN, FILE_NAME, NAME
from templates.model import SourceKind

DOCKERFILE = "Dockerfile"

err = Console(stderr=True, highlight=False)

_HEAD = """\
# A template defines what is in a sandbox. All fields are explained in docs/templates.md.
title = "{title}"
description = "What a model should know before it chooses this template."
language = "{language}"  # what run_code accepts: {languages}
# pool = "cold"  # keep no machine ready; start each one on demand
# network = "none"  # its sandboxes may have no network, whatever the operator allows others
# user_namespaces = true  # for programs with their own sandbox, such as Chromium

"""

# Debian sources by language. The others take theirs from a built-in template and so share its image.
_DEBIAN = {
    "python": """\
[source.debian]
suite = "bookworm"  # or "trixie"
packages = []  # Debian packages, such as "graphviz"
wheels = [  # exact versions, so that a rebuild gives the same image
  "ipython==9.18.1",  # run_code needs it
]
""",
    "shell": """\
[source.debian]
suite = "bookworm"  # or "trixie"
packages = ["jq"]  # the commands you need
""",
}

_OCI = """\
[source]
# name:tag, name@sha256:…, or files: oci:DIR, oci-archive:FILE, docker-archive:FILE
oci = "{image}"{note}
"""

# Python code runs in the image's own Python, which needs IPython. The plain Python image has none.
_IPYTHON_IMAGE = "docker.io/jupyter/base-notebook:python-3.11"
_IPYTHON_NOTE = "  # run_code needs python3 3.11 or newer with IPython in the image"

_DOCKERFILE_SOURCE = f"""\
[source]
dockerfile = "{DOCKERFILE}"  # in this directory, which is also the build context
"""

_DOCKERFILE_RUN = {
    "python": "# run_code needs it\nRUN pip install --no-cache-dir ipython\n",
    "shell": "RUN apt-get update && apt-get install --yes --no-install-recommends jq && rm -rf /var/lib/apt/lists/*\n",
}

_TAIL = """\

[machine]
memory_mb = {memory_mb}
vcpus = 1
disk_mb = 1024  # space for files that a sandbox writes

# Environment of code, commands and the service.
[env]
# EXAMPLE = "value"
{env}
# Runs once, before the snapshot is taken.
[warmup]
code = \"""
\"""

# A process that starts before the snapshot is taken and runs in every sandbox.
# [service]
# start_cmd = "exec python3 -m http.server 8000"
# ready_cmd = "python3 -c 'import socket; socket.create_connection((\\"localhost\\", 8000))'"  # succeeds once it serves
"""


def init(
    settings: Settings, name: str, language: LanguageName | None, source: SourceKind, directory: Path | None
) -> int:
    """Write a new template, and print the next steps."""
    chosen: LanguageName = language or ("python" if source == "debian" else "shell")

    def main() -> int:
        if directory is None and not settings.template_path:
            raise BadRequest("template_path names no directory. Add one to it, or name one with --dir.")
        root = directory.absolute() if directory else settings.template_path[0]
        folder = write_template(root, name, chosen, source)
        err.print(f"Wrote {escape(str(folder / FILE_NAME))}.", soft_wrap=True)
        if root not in settings.template_path:
            shown = escape(str(root))
            err.print(f"[yellow]![/] {shown} is not on the search path. Add it to template_path.", soft_wrap=True)
        err.print(f"Edit it, then build it: mcp-sandbox template build {name}", soft_wrap=True)
        err.print(f"To rebuild on every change: mcp-sandbox template build {name} --watch", soft_wrap=True)
        return 0

    return report_errors(main)


def write_template(root: Path, name: str, language: LanguageName, source: SourceKind) -> Path:
    """Write a template that can be built unchanged.

    Raises:
        BadRequest: the name is not valid, or the directory exists.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r} is not a valid template name. Use up to 63 lower-case letters, digits and hyphens.")
    folder = root / name
    with users_umask():
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise BadRequest(f"{folder} already exists. Choose another name or edit the template there.") from None
        if source == "dockerfile":
            (folder / DOCKERFILE).write_text(f"FROM {facts(language).image}\n{_DOCKERFILE_RUN.get(language, '')}")
        (folder / FILE_NAME).write_text(text_of(name, language, source))
    return folder


def text_of(name: str, language: LanguageName, source: SourceKind) -> str:
    """Return the text of a template.toml with all fields, optional ones as comments."""
    title = name.replace("-", " ").capitalize()
    sources = {
        "debian": _DEBIAN.get(language) or _built_in_table(language, "source.debian"),
        "oci": _oci_source(language),
        "dockerfile": _DOCKERFILE_SOURCE,
    }
    tail = _TAIL.format(memory_mb=facts(language).memory_mb, env=_variables(language, source))
    return _HEAD.format(title=title, language=language, languages=", ".join(NAMES)) + sources[source] + tail


def _oci_source(language: LanguageName) -> str:
    if language == "python":
        return _OCI.format(image=_IPYTHON_IMAGE, note=_IPYTHON_NOTE)
    return _OCI.format(image=facts(language).image, note="")


def _variables(language: LanguageName, source: SourceKind) -> str:
    """Return the environment variables a language needs; OCI images bring their own."""
    return _built_in_table(language, "env").partition("\n")[2] if source == "debian" else ""


def _built_in_table(language: LanguageName, table: str) -> str:
    """Return the text of a table in the language's built-in template; empty if there is none."""
    if language in _DEBIAN:
        return ""
    text = (BUILT_IN / facts(language).template / FILE_NAME).read_text()
    found = re.search(rf"^\[{re.escape(table)}\]\n.*?(?=\n*^\[|\n*\Z)", text, re.MULTILINE | re.DOTALL)
    return f"{found.group()}\n" if found else ""
