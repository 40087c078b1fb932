"""What one shell command leaves for the next: the directory it ended in and the variables it exported.

There is no shell that stays. Each command gets a new one, which first takes over the session and, when it exits,
writes down how it leaves it: no command can hang or break the next one's shell, and a copy of the machine has it all.
"""

import os
from typing import Any, NamedTuple

from guest.errors import RequestRefused
from guest.places import WORKSPACE

SHELL_NAME = "sh"  # in messages; which one it is, the user need not care
RECORD_FD = 9  # where a shell writes its session down; the highest that every shell has a notation for
MAX_ARGUMENT = 120 * 1024  # bytes; Linux takes 128 KiB
MAX_RECORD = 96 * 1024  # bytes of a session; it goes to the next shell in one argument
TOO_MUCH = "mcp-sandbox: more than 96 KiB of exported variables; the next command finds those from before this one\n"

# The command is evaluated as a text of its own, so that messages show nothing else, and on the first line, so that they
# count its lines.
_SCRIPT = (
    """trap '{ printf "%s\\0" "$PWD"; export -p; } 2>/dev/null >&9' EXIT; eval "$1"; """
    """command_=$2; shift 2; eval "$command_" """
)


class Call(NamedTuple):
    """What is given with one command, and holds for it alone."""

    cwd: str | None
    env: dict[str, str]
    stdin: bytes


class Session:
    """The directory and the variables that commands hand on."""

    def __init__(self) -> None:
        self.folder = WORKSPACE
        self.exports = ""  # as the shell writes them; none: what the agent was told to set
        self._left_in = ""  # the directory that the exported variables tell of

    def resolve(self, cwd: str | None) -> str:
        """Where a command starts."""
        if cwd is None:
            return self.folder
        return cwd if cwd.startswith("/") else f"{self.folder}/{cwd}"

    def arguments(self, command: str, call: Call, folder: str) -> list[str]:
        """What a shell that is in `folder` gets after `-c`. Raises RequestRefused."""
        lines = [self.exports]
        if self.exports and folder != self._left_in:
            lines.append(f"cd -- {quoted(folder)}")
        lines += [f"export {name}={quoted(value)}" for name, value in call.env.items()]
        start = "\n".join(lines)
        if len(os.fsencode(command)) > MAX_ARGUMENT:
            raise RequestRefused(
                "too_large", f"a command of more than {MAX_ARGUMENT:,} bytes; write it to a file, and run that"
            )
        if len(os.fsencode(start)) > MAX_ARGUMENT:
            raise RequestRefused(
                "too_large", "env is too large; write the values to a file, and read it in the command"
            )
        return [_SCRIPT, SHELL_NAME, start, command]

    def take(self, record: bytes, call: Call) -> str:
        """Remember what a shell wrote down as it exited; returns what the user should know.

        What a call was given is its own: with `cwd` the session stays where it was, with `env` its variables do.
        """
        folder, separator, exports = record.decode("utf-8", "surrogateescape").partition("\0")
        # None: it became another program, or had another idea of its exit. Two: the command has written here itself.
        if not separator or "\0" in exports:
            return ""
        if call.cwd is None and folder.startswith("/"):
            self.folder = folder
        if call.env:
            return ""
        if len(record) > MAX_RECORD:
            return TOO_MUCH
        self.exports, self._left_in = exports, folder
        return ""


def parse_call(options: dict[str, Any]) -> Call:
    """Options as they came over the wire. Raises RequestRefused."""
    cwd, env, stdin = options.get("cwd"), options.get("env") or {}, options.get("stdin", "")
    if not (cwd is None or _is_text(cwd)) or type(stdin) is not str:
        raise RequestRefused("bad_request", "cwd and stdin have to be text")
    if type(env) is not dict or not all(_is_name(name) and _is_text(value) for name, value in env.items()):
        raise RequestRefused("bad_request", "env has to be names of variables with their texts")
    return Call(cwd, env, stdin.encode("utf-8", "replace"))


def quoted(text: str) -> str:
    """A word that no shell finds anything in."""
    inner = text.replace("'", "'\\''")
    return f"'{inner}'"


def _is_name(value: object) -> bool:
    return type(value) is str and value.isascii() and value.isidentifier()


def _is_text(value: object) -> bool:
    return type(value) is str and "\0" not in value
