"""Shows what changes in a client's configuration, keeps the old one and writes the new one."""

import difflib
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.commands.common import SERVER_ARGS, report_errors
from mcp_sandbox.commands.install.clients import CLIENTS
from mcp_sandbox.commands.install.edit import CannotEdit, snippet, with_server, without_server
from mcp_sandbox.errors import SandboxError

NAME = "mcp-sandbox"
BACKUP = ".before-mcp-sandbox"
PRIVATE = 0o600


@dataclass(eq=False)
class UnknownClient(SandboxError):
    """No client has this name."""

    code = "client_not_found"
    sentence = "There is no client called {name!r}. Known: {known}."
    name: str
    known: str


@dataclass(eq=False)
class ConfigurationNotEditable(SandboxError):
    """A client's configuration cannot be changed without losing something in it, so it was left alone."""

    code = "configuration_not_editable"
    sentence = "{path} was left as it is: {reason}. Add this by hand:\n{snippet}"
    path: str
    reason: str
    snippet: str


def install(client_name: str, *, undo: bool, dry_run: bool) -> int:
    """Add this server to a client's configuration, or remove it."""
    return report_errors(lambda: _install(client_name, undo=undo, dry_run=dry_run))


def _install(client_name: str, *, undo: bool, dry_run: bool) -> int:
    client = CLIENTS.get(client_name)
    if client is None:
        raise UnknownClient(client_name, ", ".join(CLIENTS))
    path = client.file().resolve()  # a link stays a link: many keep such files elsewhere
    entry = client.entry(*server_command())
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = without_server(client, before, NAME) if undo else with_server(client, before, NAME, entry)
    except (CannotEdit, UnicodeDecodeError) as error:
        raise ConfigurationNotEditable(str(path), str(error), snippet(client, NAME, entry)) from error
    if after == before:
        sys.stdout.write(f"{path}: nothing to change.\n")
        return 0
    sys.stdout.write(_difference(path, before, after))
    if not dry_run:
        kept = _write(path, after)
        old = f" The old file is {kept}." if kept else ""
        sys.stdout.write(
            f"{client.title}: {'removed' if undo else 'added'} {NAME}.{old} {'' if undo else client.then}\n"
        )
    return 0


def server_command() -> tuple[str, list[str]]:
    """Return how a client starts this server, whatever its own PATH is."""
    script = Path(sys.executable).parent / NAME
    return (str(script), []) if script.exists() else (sys.executable, list(SERVER_ARGS))


def _difference(path: Path, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="", n=2)
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> Path | None:
    """Replace a file at once, so that a client never reads half of it; return where the old one is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = None
    mode = PRIVATE  # such files can have keys in them
    if path.exists():
        mode = path.stat().st_mode & 0o777
        kept = path.with_name(path.name + BACKUP)
        shutil.copy2(path, kept)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(new).chmod(mode)
        Path(new).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(new).unlink()
        raise
    return kept
