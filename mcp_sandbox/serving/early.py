"""Answers an `initialize` that is there when the program starts, before settings and the SDK are imported.

The answer depends on nothing that would have to be read first, but for one setting: a server that only relays to
another one leaves the answer to that one.
"""

import os
import select
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from mcp_sandbox.serving.initialize import NAME, answer_to, parse_initialize

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EarlyGreeting:
    """What was read from the client, and answered, before the server itself has started."""

    received: bytes = b""
    answered: int | str | None = None  # the request's id


def greet_early(wire_in: int = 0, wire_out: int = 1) -> EarlyGreeting:
    """Answer the client's first line, if it is there and an ordinary `initialize`. Does not wait."""
    received = b""
    with suppress(OSError):  # the client is gone, as the server will notice
        if _may_relay() or not select.select([wire_in], [], [], 0)[0]:
            return EarlyGreeting()
        received = os.read(wire_in, READ_BYTES)
        line, newline, _ = received.partition(b"\n")
        request = parse_initialize(line) if newline else None
        if request is None:
            return EarlyGreeting(received)
        answer = answer_to(request).encode()
        # What fits into PIPE_BUF is written as a whole to a pipe that polls as writable.
        if len(answer) <= select.PIPE_BUF and select.select([], [wire_out], [], 0)[1]:
            os.write(wire_out, answer)
            return EarlyGreeting(received, request["id"])
    return EarlyGreeting(received)


def _may_relay() -> bool:
    """Return whether the user's configuration file may name a server to connect to. `start` has read the variable."""
    path = Path(platformdirs.user_config_path(NAME)) / f"{NAME}.toml"
    try:
        return "connect" in tomllib.loads(path.read_text())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # the settings will say what is wrong
        return True
