"""Everything that can go wrong with a machine.

VmmError
├── DriverUnavailable   this host cannot run the driver; carries what to do about it
├── LaunchFailed        the machine did not start; nothing of it is left
├── SnapshotFailed      the snapshot was not taken, or cannot be restored; nothing is left
├── MachineLost         a machine that was running is gone, or its outcome is unknown
├── ToolMissing         a program of the host's that we call is not installed
└── ToolFailed          such a program was run to its end and reported failure
"""

import shlex
from collections.abc import Sequence

from vmm.types import Exit


class VmmError(Exception):
    """Base of all errors this room raises."""


class DriverUnavailable(VmmError):
    """The driver cannot be used on this host. `fix` is the command or step that would change that."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class LaunchFailed(VmmError):
    """The machine never came up. What it had printed is in the message."""


class SnapshotFailed(VmmError):
    """The snapshot could not be taken or read."""


class MachineLost(VmmError):
    """The machine ended, or stopped answering, while somebody was using it."""


class ToolMissing(VmmError):
    """A program we call is not on this host."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed; `mcp-sandbox setup` gets it")
        self.program = program


class ToolFailed(VmmError):
    """A command that was run to its end reported failure."""

    def __init__(self, argv: Sequence[str], exit_: Exit) -> None:
        super().__init__(f"`{shlex.join(argv)}` ended with {exit_}")
        self.exit = exit_

    @property
    def gist(self) -> str:
        """The last line it printed, which most often says what went wrong; the command is for logs."""
        lines = self.exit.detail.split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), str(self.exit))
