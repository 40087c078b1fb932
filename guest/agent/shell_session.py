"""What one shell command leaves to the next: the directory it ended in and the variables it exported.

No shell stays between commands. Each command gets a new one, which first restores the session and writes it down as it
exits: no command can hang or break the next one's shell, and a fork of the machine has the session, too.
"""

import os
import shlex
from typing import Any, NamedTuple

from guest.environment import Changes
from guest.errors import RequestRefused
from guest.places import WORKSPACE

SHELL_NAME = "sh"  # in messages, whichever shell it is
RECORD_FD = 9  # where a shell writes its session; the highest number that every shell can redirect to
MAX_ARGUMENT = 120 * 1024  # bytes; Linux allows 128 KiB
MAX_RECORD = 96 * 1024  # bytes of a session; the next shell gets it in one argument
TOO_LARGE = "mcp-sandbox: more than 96 KiB of exported variables; the next command gets those from before this one\n"

# The command is evaluated separately, so that error messages quote nothing else, and on the first line, so that they
# count its lines.
_SCRIPT = (
    """trap '{ printf "%s\\0" "$PWD"; export -p; } 2>/dev/null >&9' EXIT; eval "$1"; """
    """command_=$2; shift 2; eval "$command_" """
)


class Call(NamedTuple):
    """The options of one command, which apply to it alone."""

    cwd: str | None
    env: dict[str, str]
    stdin: bytes


class Session:
    """The directory and the variables that commands pass on."""

    def __init__(self) -> None:
        self.folder = WORKSPACE
        self.exports = ""  # as the shell writes them; empty: the agent's environment
        self._left_in = ""  # the directory that the exported variables name

    def resolve(self, cwd: str | None) -> str:
        """Return the directory a command starts in."""
        if cwd is None:
            return self.folder
        return cwd if cwd.startswith("/") else f"{self.folder}/{cwd}"

    def arguments(self, command: str, call: Call, folder: str) -> list[str]:
        """Return the arguments after `-c` for a shell that starts in `folder`. Raises RequestRefused."""
        lines = [self.exports]
        if self.exports and folder != self._left_in:
            lines.append(f"cd -- {shlex.quote(folder)}")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in call.env.items()]
        start = "\n".join(lines)
        if not _is_text(command):
            raise RequestRefused("bad_request", "a command cannot contain a NUL character")
        if len(os.fsencode(command)) > MAX_ARGUMENT:
            raise RequestRefused(
                "too_large", f"the command has more than {MAX_ARGUMENT:,} bytes; write it to a file and run that"
            )
        if len(os.fsencode(start)) > MAX_ARGUMENT:
            raise RequestRefused(
                "too_large", "env is too large; write the values to a file and let the command read it"
            )
        return [_SCRIPT, SHELL_NAME, start, command]

    def change(self, changes: Changes) -> None:
        """Change variables as if the last command had done so."""
        if self.exports:
            lines = (f"unset {n}" if v is None else f"export {n}={shlex.quote(v)}" for n, v in changes.items())
            self.exports += "\n" + "\n".join(lines)

    def take(self, record: bytes, call: Call) -> str:
        """Remember what a shell wrote as it exited; returns a note for the user, or nothing.

        What a call was given applies to it alone: with `cwd` the directory is not taken over, with `env` no variables.
        """
        folder, separator, exports = record.decode("utf-8", "surrogateescape").partition("\0")
        # No separator: the shell replaced itself or its EXIT trap. Two: the command has written here itself.
        if not separator or "\0" in exports:
            return ""
        if call.cwd is None and folder.startswith("/"):
            self.folder = folder
        if call.env:
            return ""
        if len(record) > MAX_RECORD:
            return TOO_LARGE
        self.exports, self._left_in = exports, folder
        return ""


def parse_call(options: dict[str, Any]) -> Call:
    """Parse the options of a command. Raises RequestRefused."""
    cwd, env, stdin = options.get("cwd"), options.get("env") or {}, options.get("stdin", "")
    if not (cwd is None or _is_text(cwd)) or type(stdin) is not str:
        raise RequestRefused("bad_request", "cwd and stdin must be strings")
    if type(env) is not dict or not all(_is_name(name) and _is_text(value) for name, value in env.items()):
        raise RequestRefused("bad_request", "env must map names of variables to strings")
    return Call(cwd, env, stdin.encode("utf-8", "replace"))


def _is_name(value: object) -> bool:
    return type(value) is str and value.isascii() and value.isidentifier()


def _is_text(value: object) -> bool:
    return type(value) is str and "\0" not in value
