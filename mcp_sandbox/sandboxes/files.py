"""Files in a sandbox: where a path leads, and what to say when it leads nowhere."""

import mimetypes
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from guest.client import AgentClient
from guest.errors import RequestRefused
from guest.places import WORKSPACE
from mcp_sandbox.errors import BadRequest, FileProblem
from mcp_sandbox.machines.unique import AGENT_TIMEOUT_S

MAX_PATH_BYTES = 4095  # PATH_MAX without its final NUL
CHUNK_BYTES = 1 << 20  # the most one frame of the guest protocol carries
# All of one operation. 16 MB take a second or two, but a guest may be busy or mean to be slow.
FILE_TIMEOUT_S = AGENT_TIMEOUT_S - 10.0

SNIFF_BYTES = 16  # enough to know a picture
_PICTURES = (  # what models can look at, by how its bytes begin
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

_ADVICE = {
    "not_found": "does not exist; list_files shows what is there",
    "is_directory": "is a directory; use list_files to see what is in it",
    "not_a_file": "is not a regular file",
    "no_space": "does not fit: the sandbox's disk is full; remove files or use a new sandbox",
    "denied": "may not be accessed",
    "too_large": "is too large",
}


def resolve(path: str, base: str = WORKSPACE) -> str:
    """The absolute path in the sandbox that `path` means; a relative one starts at `base`.

    Raises:
        BadRequest: no file can have such a path.
    """
    if not path or "\0" in path:
        raise BadRequest("The path is empty or contains a null byte. Give a path such as data.csv.")
    if len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise BadRequest(f"The path is longer than {MAX_PATH_BYTES} bytes.")
    return posixpath.normpath(posixpath.join(base, path))


def mime_of(path: str) -> str:
    """The type of a file, by its name."""
    return mimetypes.guess_type(path, strict=False)[0] or "application/octet-stream"


def image_mime(data: bytes) -> str | None:
    """The type of a picture, by its first bytes: clients choke on a file that is only called one."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _PICTURES if data.startswith(magic)), None)


@contextmanager
def file_operation(path: str) -> Iterator[None]:
    """Bound what is done with the file at `path` in time, and say what an agent's refusal means for it.

    Raises:
        FileProblem: it was refused, or took too long; the sandbox is as good as before.
    """
    try:
        with anyio.fail_after(FILE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise FileProblem(
            f"{path}: the sandbox did not answer within {FILE_TIMEOUT_S:g} s. It may be busy; try again, "
            "or close it if it stays so."
        ) from None
    except RequestRefused as refusal:
        why = _ADVICE.get(refusal.code, f"was refused by the sandbox: {refusal.message}")
        raise FileProblem(f"{path} {why}.") from refusal


async def read_all(agent: AgentClient, path: str, max_bytes: int) -> bytes:
    """The whole file.

    Raises:
        FileProblem: it is longer than `max_bytes`, or cannot be read.
    """
    data = bytearray()
    with file_operation(path):
        while True:
            chunk = await agent.read(path, offset=len(data), limit=min(CHUNK_BYTES, max_bytes - len(data) + 1))
            data += chunk.data
            if len(data) > max_bytes or chunk.size > max_bytes:
                raise FileProblem(
                    f"{path} has {max(chunk.size, len(data)):,} bytes, more than the {max_bytes:,} that are handed out "
                    "at once. Read it in parts, or have code in the sandbox shrink it."
                )
            if chunk.eof or not chunk.data:
                return bytes(data)
