"""What can go wrong with a machine.

VmmError
├── DriverUnavailable    this host cannot run the driver; `fix` says what would help
├── Untrusted            another user could have changed a file that is about to be executed, booted or obeyed
├── NetworkUnsupported   the driver has no such network mode
├── LaunchFailed         the machine did not start; nothing of it is left
├── SnapshotFailed       the snapshot was not taken, or cannot be restored; nothing is left
├── MachineLost          a running machine has ended, or the outcome of a request to it is unknown
├── ToolMissing          a program of the host that we call is not installed
└── ToolFailed           such a program reported failure
"""

import shlex
from collections.abc import Sequence

from vmm.types import Exit


class VmmError(Exception):
    """Base of all errors that `vmm` raises."""


class DriverUnavailable(VmmError):
    """The driver cannot be used on this host. `fix` is a command or step that would change that."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class Untrusted(VmmError):
    """Another user could have changed or replaced a file that is about to be executed, booted or obeyed."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(f"{message}; {fix}")


class NetworkUnsupported(VmmError):
    """The driver cannot give machines this network mode."""


class LaunchFailed(VmmError):
    """The machine did not start. The message has what it printed."""


class SnapshotFailed(VmmError):
    """The snapshot could not be taken or restored."""


class MachineLost(VmmError):
    """The machine ended or stopped answering while it was in use."""


class ToolMissing(VmmError):
    """A program that we call is not installed."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is not installed; `mcp-sandbox setup` installs it")
        self.program = program


class ToolFailed(VmmError):
    """A command reported failure."""

    def __init__(self, argv: Sequence[str], exit_: Exit) -> None:
        super().__init__(f"`{shlex.join(argv)}` ended with {exit_}")
        self.exit = exit_

    @property
    def gist(self) -> str:
        """Return the last line that the command printed, which mostly says what went wrong."""
        lines = self.exit.detail.split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), str(self.exit))
