"""Errors of files in sandboxes and in directories of the host."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError


@dataclass(eq=False)
class FileError(SandboxError):
    """A file operation in the sandbox failed. Only subclasses are raised."""

    code = "file_error"
    path: str


@dataclass(eq=False)
class FileNotFound(FileError):
    """Nothing is at the path."""

    code = "file_not_found"
    sentence = "{path} does not exist."


@dataclass(eq=False)
class FileNotPermitted(FileError):
    """The sandbox's user may not access the file."""

    code = "file_not_permitted"
    sentence = "{path} may not be accessed: {reason}."
    reason: str = "the sandbox's user may not do that"


@dataclass(eq=False)
class FileTooLarge(FileError):
    """The file is larger than a limit."""

    code = "file_too_large"
    sentence = "{path} has {size:,} bytes; at most {limit:,} are possible at once."
    size: int
    limit: int


@dataclass(eq=False)
class WrongFileKind(FileError):
    """The path leads to a directory where a file is needed, or the reverse."""

    code = "wrong_file_kind"
    sentence = "{path} is {kind}."
    kind: str  # "a directory", "not a regular file"


@dataclass(eq=False)
class SandboxDiskFull(FileError):
    """The sandbox's own disk is full."""

    code = "sandbox_disk_full"
    sentence = "{path} was not written: the sandbox's disk is full."


@dataclass(eq=False)
class FileTimeout(FileError):
    """The sandbox did not answer in time."""

    code = "file_timeout"
    sentence = "{path}: the sandbox did not answer within {waited_s:g} s; it may be busy."
    waited_s: float


@dataclass(eq=False)
class FileRefused(FileError):
    """The sandbox refused the file operation for another reason."""

    code = "file_refused"
    sentence = "{path}: the sandbox refused the operation: {reason}."
    reason: str


@dataclass(eq=False)
class HostDirNotFound(SandboxError):
    """The operator opened no directory of the host with this name."""

    code = "host_dir_not_found"
    name: str
    known: list[str]

    def __str__(self) -> str:
        return f"There is no directory {self.name!r} on the host. Paths begin with one of: {', '.join(self.known)}."


@dataclass(eq=False)
class HostDirReadOnly(SandboxError):
    """The operator opened this directory of the host for reading only."""

    code = "host_dir_read_only"
    sentence = "Nothing can be copied to {name!r}: the operator opened it for reading only."
    name: str


@dataclass(eq=False)
class HostFileFailed(SandboxError):
    """A file of the host cannot be read or written; nothing was copied."""

    code = "host_file_failed"
    sentence = "{path} on the host was not copied: {reason}."
    path: str  # below the name of its directory
    reason: str
