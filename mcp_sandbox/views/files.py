"""Files and artifacts of a sandbox."""

import mimetypes
from urllib.parse import quote

from pydantic import Field

from mcp_sandbox.views.base import View

FILE_META = "mcp-sandbox/file"  # where the `_meta` of an MCP result carries a FilePart
NEXT_OFFSET = "Give this as offset to go on. null and truncated: list a subdirectory."


class FileView(View):
    """One entry of a sandbox's file system."""

    path: str
    kind: str = Field(description="file, dir, link or other")
    size: int


class FileList(View):
    """The entries of a directory."""

    path: str
    entries: list[FileView]
    truncated: bool = Field(description="true: there are more entries")
    next_offset: int | None = Field(None, description=NEXT_OFFSET)


class ArtifactView(View):
    """A file in the outputs directory."""

    path: str
    size: int
    mime_type: str
    uri: str | None = Field(None, description="Address for resources/read; null if the sandbox is gone.")


class ArtifactList(View):
    """The artifacts of a sandbox."""

    artifacts: list[ArtifactView]
    truncated: bool = Field(description="true: there are more artifacts")
    next_offset: int | None = Field(None, description=NEXT_OFFSET)


class WrittenFile(View):
    """A file that was written."""

    path: str
    size: int


class CopiedFile(View):
    """A file that was copied between a sandbox and a directory of the host."""

    source: str
    target: str
    size: int
    archive: bool = Field(description="true: the source is a directory, and the target a tar archive of it.")
    skipped: int = Field(0, description="Links and special files that are not in the archive.")
    unpack: str | None = Field(None, description="The command that unpacks an archive in the sandbox.")


class FilePart(View):
    """The part of a file that an answer has."""

    path: str
    size: int = Field(description="Bytes of the whole file.")
    offset: int
    next_offset: int | None = Field(description="Where the next part begins; null at the end of the file.")


class SkippedMember(View):
    """A member of an archive that was not unpacked."""

    name: str
    reason: str


class UnpackedArchive(View):
    """What an archive brought into a directory."""

    path: str
    files: int
    directories: int
    size: int = Field(description="Bytes of all files.")
    skipped: int = Field(description="Members that are links or other special files, or lead out of the directory.")
    skipped_members: list[SkippedMember] = Field(description="The first of them.")


def file_uri(sandbox_id: str, path: str) -> str:
    """Return the resource address of a file in a sandbox."""
    return f"sandbox://{sandbox_id}/{quote(path.lstrip('/'))}"


def mime_of(path: str) -> str:
    """Return the MIME type of a file by its name."""
    name = path.rpartition("/")[2]  # `mimetypes` would return what a path such as "data:…/…," says
    return mimetypes.guess_type(name, strict=False)[0] or "application/octet-stream"
