"""Everything that can go wrong with a machine.

VmmError
├── DriverUnavailable   this host cannot run the driver; carries what to do about it
├── LaunchFailed        the machine did not start; nothing of it is left
├── SnapshotFailed      the snapshot was not taken, or cannot be restored; nothing is left
└── MachineLost         a machine that was running is gone, or its outcome is unknown
"""


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
