"""`mcp-sandbox cp` against a server that lists what a machine says, however strange."""

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.commands.remote import copying
from mcp_sandbox.commands.remote.errors import CannotCopy, RequestRefused
from mcp_sandbox.config import Settings

BOX = "sb-1"


class FakeServer:
    """Has directories with entries, two to a page, and keeps what is sent."""

    def __init__(self, folders: dict[str, list[tuple[str, str]]]) -> None:
        self.folders = folders
        self.sent: dict[str, bytes] = {}
        self.lost = 0  # files of an archive

    def get(self, _path: str, /, *, path: str, offset: int = 0) -> Any:
        if path not in self.folders:
            raise RequestRefused("no directory", "wrong_file_kind")
        entries = [{"path": name, "kind": kind} for name, kind in self.folders[path]]
        more = offset + 2 < len(entries)
        return {
            "entries": entries[offset : offset + 2],
            "next_offset": offset + 2 if more else None,
            "truncated": more,
        }

    @contextmanager
    def download(self, _path: str, /, *, path: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        yield len(path), iter([path.encode()])

    def put(self, at: str, parts: Iterable[bytes], _size: int | None, /, *, path: str) -> Any:
        if not at.endswith("/archive"):
            self.sent[path] = b"".join(parts)
            return None
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as archive:
            for member in archive:
                content = archive.extractfile(member)
                self.sent[f"{path}/{member.name}"] = b"" if content is None else content.read()
            return {"files": sum(member.isfile() for member in archive) - self.lost}


def copied(monkeypatch: pytest.MonkeyPatch, server: FakeServer, source: str, target: str) -> None:
    monkeypatch.setattr(copying, "server_for", lambda _settings, _url: server)
    monkeypatch.setattr(copying, "report_errors", lambda work: work())
    assert copying.copy(Settings(), None, source, target) == 0


def test_every_file_of_a_directory_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [(f"/tmp/outputs/{number}", "file") for number in range(5)]
    server = FakeServer(
        {
            "../tmp/outputs": [],
            "/tmp/outputs": [*names, ("/tmp/outputs/more", "dir"), ("/tmp/outputs/link", "link")],
            "/tmp/outputs/more": [("/tmp/outputs/more/last", "file")],
        }
    )
    copied(monkeypatch, server, f"{BOX}:../tmp/outputs", str(tmp_path / "out"))
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"0", "1", "2", "3", "4", "more/last"}


@pytest.mark.parametrize("path", ["/etc/passwd", "/workspace/d/../../x", "/workspace/d/a/b", "/workspace/d/\x1b[2J"])
def test_a_name_that_no_listing_has_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    server = FakeServer({"d": [], "/workspace/d": [(path, "file")]})
    with pytest.raises(CannotCopy, match="unusual name"):
        copied(monkeypatch, server, f"{BOX}:d", str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_a_link_is_not_followed_into_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "code.py").write_text("1")
    (folder / "link").symlink_to(tmp_path / "secret")
    server = FakeServer({".": []})
    copied(monkeypatch, server, str(folder), f"{BOX}:.")
    assert server.sent == {"project/code.py": b"1"}


def test_a_directory_is_sent_as_one_archive_with_empty_directories_and_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = f"{'ü' * 60}/{'y' * 120}"
    folder = tmp_path / "project"
    (folder / "empty").mkdir(parents=True)
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / long).parent.mkdir()
    (folder / long).write_bytes(b"z" * 600_000)
    (tmp_path / "link").symlink_to(folder)  # named by the user, so it is followed
    server = FakeServer({})
    copied(monkeypatch, server, str(tmp_path / "link"), f"{BOX}:there")
    folders = {"there/empty": b"", f"there/{'ü' * 60}": b""}
    assert server.sent == {**folders, f"there/{long}": b"z" * 600_000}


@pytest.mark.parametrize("name", [b"\xff", b"a/\xff/b"])
def test_a_name_that_is_not_utf_8_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes):
    file = tmp_path / "project" / os.fsdecode(name)
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(CannotCopy, match="not UTF-8"):
        copied(monkeypatch, FakeServer({}), str(tmp_path / "project"), f"{BOX}:there")


def test_a_file_that_the_server_did_not_unpack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").touch()
    server = FakeServer({})
    server.lost = 1
    with pytest.raises(CannotCopy, match="0 of 1 files"):
        copied(monkeypatch, server, str(tmp_path), f"{BOX}:there")


def test_a_directory_of_a_sandbox_does_not_lead_through_a_link_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    (out / "more").mkdir(parents=True)
    (out / "more" / "link").symlink_to(elsewhere)
    server = FakeServer(
        {
            "d": [],
            "/workspace/d": [("/workspace/d/more", "dir")],
            "/workspace/d/more": [("/workspace/d/more/link", "dir")],
            "/workspace/d/more/link": [("/workspace/d/more/link/file", "file")],
        }
    )
    monkeypatch.chdir(tmp_path)
    out.rename("d")
    with pytest.raises(CannotCopy, match="has a link where the sandbox has a directory"):
        copied(monkeypatch, server, f"{BOX}:d", str(tmp_path))
    assert list(elsewhere.iterdir()) == []
