"""Access to files in a sandbox: resolving paths, time limits, and errors of the agent."""

import posixpath
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager

import anyio

from guest.client import AgentClient
from guest.client.messages import FileInfo
from guest.client.wire import one_line
from guest.errors import RequestRefused
from guest.places import WORKSPACE
from mcp_sandbox.errors import (
    BadRequest,
    FileError,
    FileNotFound,
    FileNotPermitted,
    FileRefused,
    FileTimeout,
    FileTooLarge,
    SandboxDiskFull,
    WrongFileKind,
)
from mcp_sandbox.machines.unique import AGENT_TIMEOUT_S
from mcp_sandbox.views import ArtifactView, file_uri, mime_of

MAX_PATH_BYTES = 4095  # PATH_MAX without its final NUL
CHUNK_BYTES = 1 << 20  # the most one frame of the guest protocol carries
# For a whole operation. 16 MB take a second or two, but a guest may be busy, or slow on purpose.
FILE_TIMEOUT_S = AGENT_TIMEOUT_S - 10.0

MAX_REASON_CHARS = 1000  # of why the agent refused something
SNIFF_BYTES = 16  # enough to recognise an image
_IMAGES = (  # types that models accept, by their first bytes
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

DIRECTORY = "a directory"

_REFUSALS: dict[str, Callable[[str, str], FileError]] = {  # by the agent's error code; of a path and its message
    "not_found": lambda path, _: FileNotFound(path),
    "is_directory": lambda path, _: WrongFileKind(path, DIRECTORY),
    "not_a_file": lambda path, _: WrongFileKind(path, "not a regular file"),
    "not_a_directory": lambda path, part: WrongFileKind(_part_of(path, part), "a file, not a directory"),
    "no_space": lambda path, _: SandboxDiskFull(path),
    "denied": FileNotPermitted,
}


def _part_of(path: str, part: str) -> str:
    """Return the part of a path that the agent names, if it is one."""
    return part if f"{path}/".startswith(f"{part}/") else path


def resolve(path: str, base: str = WORKSPACE) -> str:
    """Return the absolute path of `path` in the sandbox; a relative one starts at `base`.

    Raises:
        BadRequest: no file can have such a path.
    """
    if not path or "\0" in path:
        raise BadRequest("The path is empty or contains a null byte. Give a path such as data.csv.")
    if len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise BadRequest(f"The path is longer than {MAX_PATH_BYTES} bytes.")
    return posixpath.normpath(posixpath.join(base, path))


def artifact_view(path: str, size: int, sandbox_id: str | None) -> ArtifactView:
    """Return an artifact of a sandbox; without an id the sandbox is gone."""
    uri = None if sandbox_id is None else file_uri(sandbox_id, path)
    return ArtifactView(path=path, size=size, mime_type=mime_of(path), uri=uri)


def image_mime(data: bytes) -> str | None:
    """Return the MIME type of an image by its first bytes: clients fail on files that only have an image's name."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _IMAGES if data.startswith(magic)), None)


@contextmanager
def file_operation(path: str) -> Iterator[None]:
    """Limit the time of an operation on the file at `path`, and translate the agent's refusal.

    Raises:
        FileError: it was refused or took too long; the sandbox is unaffected.
    """
    try:
        with anyio.fail_after(FILE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise FileTimeout(path, FILE_TIMEOUT_S) from None
    except RequestRefused as refusal:
        message = one_line(refusal.message, MAX_REASON_CHARS)
        raise _REFUSALS.get(refusal.code, FileRefused)(path, message) from refusal


async def read_all(agent: AgentClient, path: str, max_bytes: int) -> bytes:
    """Read a whole file.

    Raises:
        FileError: it is longer than `max_bytes`, or cannot be read.
    """
    data = bytearray()
    with file_operation(path):
        while True:
            chunk = await agent.read(path, offset=len(data), limit=min(CHUNK_BYTES, max_bytes - len(data) + 1))
            data += chunk.data
            if len(data) > max_bytes or chunk.size > max_bytes:
                raise FileTooLarge(path, max(chunk.size, len(data)), max_bytes)
            if chunk.eof or not chunk.data:
                return bytes(data)


async def write_parts(agent: AgentClient, path: str, parts: AsyncIterable[bytes]) -> FileInfo:
    """Create or replace a file from parts. Only one chunk of it is in memory; each has the time of an operation.

    Raises:
        FileError: it was refused or took too long; the file is as it was.
    """
    chunk = bytearray()
    async with agent.upload(path) as upload:
        async for part in parts:
            chunk += part
            while len(chunk) > CHUNK_BYTES:  # the last chunk is known to be the last only at the end of the parts
                with file_operation(path):
                    await upload.add(bytes(chunk[:CHUNK_BYTES]))
                del chunk[:CHUNK_BYTES]
        with file_operation(path):
            return await upload.finish(bytes(chunk))
