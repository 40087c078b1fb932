"""What goes with a shell command, checked before a sandbox sees it."""

import re
from collections.abc import Mapping
from typing import Any

from guest.protocol import MAX_BODY, encode_json
from mcp_sandbox.errors import BadRequest, InputTooLarge

MAX_PATH = 4096  # bytes, as Linux has it
MAX_VARIABLES_BYTES = 64 * 1024  # of all names and values; they reach the shell as one argument
ROOM_FOR_COMMAND = 128 * 1024  # bytes; no command can be longer
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def command_options(cwd: str | None, env: Mapping[str, str] | None, stdin: str | None) -> dict[str, Any]:
    """What the machine is told besides the command.

    Raises:
        BadRequest: one of them cannot be.
    """
    options: dict[str, Any] = {}
    if cwd is not None:
        options["cwd"] = _checked_cwd(cwd)
    if env:
        options["env"] = _checked_env(env)
    if stdin is not None:
        options["stdin"] = stdin.encode(errors="replace").decode()
    if len(encode_json(options)) > MAX_BODY - ROOM_FOR_COMMAND:
        raise InputTooLarge("stdin is too long.")
    return options


def _checked_cwd(cwd: str) -> str:
    if not cwd or "\0" in cwd or len(cwd.encode(errors="replace")) > MAX_PATH:
        raise BadRequest(
            "cwd must be a directory in the sandbox, absolute or relative to where the last command ended."
        )
    return cwd.encode(errors="replace").decode()


def _checked_env(env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not NAME.fullmatch(name):
            raise BadRequest(f"env: {name[:60]!r} is not a variable name: use letters, digits and _.")
        if "\0" in value:
            raise BadRequest(f"env: the value of {name[:60]} contains a null byte. Remove it.")
    if sum(len(name) + len(value.encode(errors="replace")) for name, value in env.items()) > MAX_VARIABLES_BYTES:
        raise InputTooLarge(f"env has more than {MAX_VARIABLES_BYTES:,} bytes.")
    return {name: value.encode(errors="replace").decode() for name, value in env.items()}
