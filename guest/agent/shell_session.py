"""What one shell command leaves to the next: the directory it ended in and the variables it exported.

No shell stays between commands. Each command gets a new one, which first restores the session and writes it down as it
exits: no command can hang or break the next one's shell, and a fork of the machine has the session, too.
"""

import os
import shlex
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from guest.environment import Changes
from guest.errors import RequestRefused
from guest.places import WORKSPACE

SHELL_NAME = "sh"  # in messages, whichever shell it is
RECORD_FD = 9  # where a shell writes its session; the highest number that every shell can redirect to
ORDER_FD = 8  # where a shell that was started ahead waits for its job
MAX_ARGUMENT = 120 * 1024  # bytes; Linux allows 128 KiB
MAX_RECORD = 96 * 1024  # bytes of a session; the next shell gets it in one argument
TOO_LARGE = "mcp-sandbox: more than 96 KiB of exported variables; the next command gets those from before this one\n"

_SAVE = """trap '{ printf "%s\\0" "$PWD"; export -p; } 2>/dev/null >&9' EXIT; """
# The command is evaluated separately, so that error messages quote nothing else, and on the first line, so that they
# count its lines.
_RUN = """eval "$1"; command_=$2; shift 2; eval "$command_" """
# The job is in a file, where a shell reads many bytes at once. From a pipe it would read one at a time.
# Before it waits, it does what it will do with its job, so that its memory is there by then.
_WAIT = (
    """eval :; { printf "%s\\0" "$PWD"; export -p; } >/dev/null; """
    f"""read -r -N 1 -u {ORDER_FD} || {{ trap - EXIT; exit 126; }}; exec {ORDER_FD}<&-; """
    f"""IFS= read -r -d '' -u {RECORD_FD} start_; IFS= read -r -d '' -u {RECORD_FD} command_; """
    """set -- "$start_" "$command_"; unset start_ command_ REPLY; """
)
WAITING = ("-c", _SAVE + _WAIT + _RUN, SHELL_NAME)  # the arguments of a shell, only bash, that waits for its job


class Call(NamedTuple):
    """The options of one command, which apply to it alone."""

    cwd: str | None
    env: dict[str, str]
    stdin: bytes


class Job(NamedTuple):
    """What a shell evaluates: first what restores the session, then the command."""

    start: str
    command: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of a new shell."""
        return ("-c", _SAVE + _RUN, SHELL_NAME, self.start, self.command)

    def written(self, changes: Changes, folder: str) -> bytes:
        """Return it for a shell that was started ahead in the workspace, with the changes to its environment.

        A shell remembers from its start on what the machine is called, how long it runs and what its random numbers
        continue. Clones of a machine have copies of it.
        """
        lines = [f"RANDOM={int.from_bytes(os.urandom(4), 'big')} SECONDS=0", *_exports(changes)]
        if "HOSTNAME" not in os.environ:  # else shells take it from there
            lines.append(f"HOSTNAME={shlex.quote(socket.gethostname())}")
        if folder != WORKSPACE:
            lines.append(f"cd -P -- {shlex.quote(folder)} || {{ trap - EXIT; exit 126; }}; unset OLDPWD; export OLDPWD")
        return os.fsencode("\n".join([*lines, self.start]) + f"\0{self.command}\0")


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

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of new shells.

        The exports, if there are any, are all of it, so that a variable that a command has unset stays unset. A shell
        still begins with its locale, because to load one later takes many system calls.
        """
        if not self.exports:
            return os.environ
        locale = {name: value for name, value in os.environ.items() if name == "LANG" or name.startswith("LC_")}
        return {name: value for name, value in locale.items() if self._declares(name, value)}

    def _declares(self, name: str, value: str) -> bool:
        return f'declare -x {name}="{value}"\n' in self.exports

    @property
    def path(self) -> str:
        """Where shells look for programs; empty if commands have changed it."""
        ours = os.environ.get("PATH", os.defpath)
        return ours if not self.exports or self._declares("PATH", ours) else ""

    def job(self, command: str, call: Call, folder: str) -> Job:
        """Return the job of a shell that starts in `folder`. Raises RequestRefused."""
        lines = [self.exports]
        if self.exports and folder != self._left_in:
            lines.append(f"cd -- {shlex.quote(folder)}")
        lines += _exports(call.env)
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
        return Job(start, command)

    def change(self, changes: Changes) -> None:
        """Change variables as if the last command had done so."""
        if self.exports:
            self.exports += "\n" + "\n".join(_exports(changes))

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


def _exports(changes: Changes) -> list[str]:
    return [f"unset {name}" if v is None else f"export {name}={shlex.quote(v)}" for name, v in changes.items()]


def _is_name(value: object) -> bool:
    return type(value) is str and value.isascii() and value.isidentifier()


def _is_text(value: object) -> bool:
    return type(value) is str and "\0" not in value
