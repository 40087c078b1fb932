"""Copies between sandboxes and directories of the host, through a real MCP client in memory."""

import io
import logging
import os
import resource
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from pydantic import ValidationError

from guest.client.messages import FileChunk
from guest.errors import RequestRefused
from mcp_sandbox.commands.common import environment
from mcp_sandbox.config import Settings, load_settings
from mcp_sandbox.serving.http import for_http
from tests.unit.fakes import FakeProvider
from tests.unit.test_tools import connected, created, error_of

DATA = bytes(range(256)) * 10_000  # more than two chunks
TOOLS = {"upload_file", "download_file"}


class Host:
    """A client of a server that opened `data` for reading and `out` for writing."""

    def __init__(self, root: Path, client: Client, provider: FakeProvider, box: str) -> None:
        self.data, self.out, self.outside = root / "data", root / "out", root / "outside"
        self.client, self.provider, self.box = client, provider, box

    @property
    def files(self) -> dict[str, bytes]:
        """The files in the sandbox."""
        return self.provider.agent.files

    async def upload(self, source: str, **more: Any) -> dict[str, Any]:
        return await self._copied("upload_file", source=source, **more)

    async def download(self, path: str, target: str, **more: Any) -> dict[str, Any]:
        return await self._copied("download_file", path=path, target=target, **more)

    async def _copied(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(tool, {"sandbox_id": self.box, **arguments})
        assert not result.is_error, result.content
        content: dict[str, Any] | None = result.structured_content
        assert content is not None
        return content

    async def refusal(self, tool: str, **arguments: Any) -> str:
        """The error of a call, after which everything is as before."""
        before = self.everything()
        said = await error_of(self.client, f"{tool}_file", **{"sandbox_id": self.box, **arguments})
        assert self.everything() == before
        assert str(self.data.parent) not in said, "a path of the host"
        return said

    def everything(self) -> list[object]:
        found = sorted((str(path), path.is_file() and path.read_bytes()) for path in self.out.rglob("*"))
        return [found, dict(self.files)]


@asynccontextmanager
async def opened(root: Path, **settings: Any) -> AsyncIterator[Host]:
    for name in ("data", "out", "outside"):
        (root / name).mkdir(exist_ok=True)
    provider = FakeProvider()
    dirs = (f"data={root}/data", f"out={root}/out:rw")
    async with connected(provider, home=root / "home", host_dirs=dirs, **settings) as client:
        yield Host(root, client, provider, await created(client))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with opened(tmp_path) as host:
        yield host


async def offered(settings: dict[str, Any]) -> set[str]:
    async with connected(FakeProvider(), **settings) as client:
        return TOOLS & {tool.name for tool in (await client.list_tools()).tools}


async def test_the_tools_are_offered_only_for_directories_that_are_open():
    assert await offered({}) == set()
    assert await offered({"host_dirs": ("data=/srv/data",)}) == {"upload_file"}
    assert await offered({"host_dirs": ("data=/srv/data", "out=/srv/out:rw")}) == TOOLS
    assert await offered({"host_dirs": ("out=/srv/out:rw",), "read_only": True}) == set()


async def test_clients_over_http_get_only_what_is_open_for_them():
    settings = Settings(host_dirs=("mine=/srv/mine:rw", "ours=/srv/ours:http", "out=/srv/out:rw:http"))
    assert [folder.name for folder in for_http(settings).host_dirs] == ["ours", "out"]


async def test_models_see_the_names_of_directories_and_no_paths(host: Host):
    tools = {tool.name: tool for tool in (await host.client.list_tools()).tools}
    assert (tools["upload_file"].description or "").endswith("Directories of the host: data, out.")
    assert (tools["download_file"].description or "").endswith("Directories of the host: out.")
    assert str(host.data.parent) not in "".join(tool.model_dump_json() for tool in tools.values())


async def test_a_file_travels_in_and_out_unchanged(host: Host):
    (host.data / "sub").mkdir()
    (host.data / "sub" / "in.bin").write_bytes(DATA)
    copied = await host.upload("data/sub/in.bin")
    assert copied == {
        "source": "data/sub/in.bin",
        "target": "/workspace/in.bin",
        "size": len(DATA),
        "archive": False,
        "skipped": 0,
        "unpack": None,
    }
    assert host.files["/workspace/in.bin"] == DATA
    await host.upload("data/sub/in.bin", path="/tmp/deep/x.bin")
    assert host.files["/tmp/deep/x.bin"] == DATA
    copied = await host.download("in.bin", "out/result.bin")
    assert (copied["source"], copied["target"], copied["size"]) == ("/workspace/in.bin", "out/result.bin", len(DATA))
    assert {path.name: path.read_bytes() for path in host.out.iterdir()} == {"result.bin": DATA}


async def test_an_empty_file_is_copied_and_a_directory_as_target_keeps_the_name(host: Host):
    (host.data / "empty").touch()
    await host.upload("data/empty", path="/workspace/sub/")
    assert host.files["/workspace/sub/empty"] == b""
    assert (await host.download("sub/empty", "out"))["target"] == "out/empty"
    assert (host.out / "empty").read_bytes() == b""


async def test_a_directory_of_the_host_becomes_one_archive_without_links(host: Host):
    (host.outside / "secret").write_text("secret")
    top = host.data / "set"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "a.csv").write_bytes(DATA)
    (top / "deep" / "er" / "b").write_text("b")
    (top / "leak").symlink_to(host.outside / "secret")
    (top / "leaks").symlink_to(host.outside)
    os.mkfifo(top / "pipe")
    copied = await host.upload("data/set")
    assert (copied["target"], copied["archive"], copied["skipped"]) == ("/workspace/set.tar", True, 3)
    assert copied["unpack"] == "tar -xf /workspace/set.tar"
    with tarfile.open(fileobj=io.BytesIO(host.files["/workspace/set.tar"])) as archive:
        assert archive.getnames() == ["a.csv", "deep", "deep/er", "deep/er/b"]
        member = archive.extractfile("a.csv")
        assert member is not None
        assert member.read() == DATA


async def test_a_directory_of_a_sandbox_becomes_one_archive(host: Host):
    host.files["/workspace/a"] = b"content"
    read = host.provider.agent.read

    async def reads(path: str, *, offset: int = 0, limit: int) -> FileChunk:
        if path == "/workspace":
            raise RequestRefused("is_directory", "it is")
        return await read(path, offset=offset, limit=limit)

    host.provider.agent.read = reads  # type: ignore[method-assign]
    copied = await host.download("/workspace", "out/")
    assert (copied["target"], copied["archive"]) == ("out/workspace.tar", True)
    with tarfile.open(host.out / "workspace.tar") as archive:
        assert archive.getnames() == ["a"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("data/link", "it is a link, and links are not followed"),
        ("data/links/secret", "data/links on the host was not copied: it is a link"),
        ("data/file/below", "data/file on the host was not copied: it is a file, not a directory"),
        ("data/pipe", "it is neither a file nor a directory"),
        ("data/none", "it does not exist; data has file, link, links, pipe."),
        ("data/../outside/secret", "is no path on the host"),
        ("data//file", "is no path on the host"),
        ("data/a\0b", "is no path on the host"),
        ("data/" + "x" * 300, "is no path on the host"),
        ("/etc/passwd", "There is no directory 'etc' on the host. Paths begin with one of: data, out."),
        ("~/x", "There is no directory '~' on the host"),
    ],
)
async def test_nothing_outside_a_directory_is_read(host: Host, source: str, reason: str):
    (host.outside / "secret").write_text("secret")
    (host.data / "file").write_text("x")
    (host.data / "link").symlink_to(host.outside / "secret")
    (host.data / "links").symlink_to(host.outside)
    os.mkfifo(host.data / "pipe")
    assert reason in await host.refusal("upload", source=source)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("data/x", "Nothing can be copied to 'data': the operator opened it for reading only."),
        ("out/there", "it exists already; choose another name, or set overwrite"),
        ("out/links/x", "out/links on the host was not copied: it is a link"),
        ("out/link", "it exists already"),
        ("out/folder", "it is a directory; name a file in it"),
        ("out/none/x", "out/none on the host was not copied: it does not exist; out has folder, "),
        ("out/../outside/x", "is no path on the host"),
    ],
)
async def test_nothing_is_written_where_it_must_not_be(host: Host, target: str, reason: str):
    host.files["/workspace/x"] = b"new"
    (host.out / "there").write_text("old")
    (host.out / "folder").mkdir()
    (host.out / "link").symlink_to(host.outside / "x")
    (host.out / "links").symlink_to(host.outside)
    assert reason in await host.refusal("download", path="x", target=target)
    assert list(host.outside.iterdir()) == []


async def test_a_link_is_replaced_and_never_written_through(host: Host):
    host.files["/workspace/x"] = b"new"
    (host.outside / "x").write_text("old")
    (host.out / "link").symlink_to(host.outside / "x")
    await host.download("x", "out/link", overwrite=True)
    assert (host.outside / "x").read_text() == "old"
    assert not (host.out / "link").is_symlink()
    assert (host.out / "link").read_bytes() == b"new"


async def test_a_file_is_as_open_to_others_as_its_directory(host: Host):
    host.files["/workspace/x"] = b"new"
    for mode, expected in ((0o700, 0o600), (0o755, 0o644), (0o775, 0o664)):
        host.out.chmod(mode)
        await host.download("x", f"out/{mode}")
        assert (host.out / str(mode)).stat().st_mode & 0o777 == expected


async def test_unknown_ids_and_missing_files_are_refused(host: Host):
    (host.data / "f").touch()
    assert "Sandbox 'sb-x' does not exist" in await host.refusal("upload", sandbox_id="sb-x", source="data/f")
    assert "Sandbox 'sb-x' does not exist" in await host.refusal("download", sandbox_id="sb-x", path="f", target="out")
    assert "/workspace/f does not exist" in await host.refusal("download", path="f", target="out")


async def test_a_copy_has_a_limit_in_both_directions(tmp_path: Path):
    async with opened(tmp_path, files={"max_copy_bytes": 1 << 20}) as host:
        with (host.data / "huge").open("wb") as file:
            file.truncate(1 << 40)
        assert "at most 1,048,576 are possible" in await host.refusal("upload", source="data/huge")
        assert "at most 1,048,576 are possible" in await host.refusal("upload", source="data")

        async def endless(path: str, *, offset: int = 0, limit: int) -> FileChunk:
            return FileChunk(bytes(limit), 10, eof=False)

        host.provider.agent.read = endless  # type: ignore[method-assign]
        assert "at most 1,048,576 are possible" in await host.refusal("download", path="liar", target="out")


async def test_a_full_disk_leaves_nothing(host: Host):
    (host.data / "in").write_bytes(DATA)
    host.provider.agent.room = 1 << 20
    assert "the sandbox's disk is full" in await host.refusal("upload", source="data/in")
    host.files["/workspace/x"] = DATA
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        said = await host.refusal("download", path="x", target="out/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out/x on the host was not copied: it is too large for the host's file system" in said


async def test_a_cancelled_copy_leaves_nothing(host: Host):
    reading = anyio.Event()

    async def stuck(path: str, *, offset: int = 0, limit: int) -> FileChunk:
        if offset:
            reading.set()
            await anyio.sleep_forever()
        return FileChunk(bytes(limit), 1 << 30, eof=False)

    host.provider.agent.read = stuck  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.download, "x", "out/x")
        await reading.wait()
        assert len(list(host.out.iterdir())) == 1  # the temporary file
        tasks.cancel_scope.cancel()
    with anyio.fail_after(10):
        while list(host.out.iterdir()):
            await anyio.sleep(0.01)


async def test_every_copy_is_logged(host: Host, caplog: pytest.LogCaptureFixture):
    (host.data / "f\n").write_text("x")
    with caplog.at_level(logging.WARNING, "mcp_sandbox.sandboxes.host_copies"):
        await host.upload("data/f\n")
        await host.refusal("download", path="none", target="out")
    done, failed = [record.getMessage() for record in caplog.records]
    assert done == f"upload of 'data/f\\n' to '' by local, sandbox {host.box}: done"
    assert failed == f"download of '/workspace/none' to 'out' by local, sandbox {host.box}: FileNotFound"


@pytest.mark.parametrize("value", ["x", "x=", "X=/a", "a b=/a", "x=relative", "x=/a,x=/b", "x=/", "x=HOME/store"])
def test_a_bad_directory_is_refused(value: str, tmp_path: Path):
    with pytest.raises(ValidationError, match="host_dirs"):
        Settings(home=tmp_path, host_dirs=value.replace("HOME", str(tmp_path)))


def test_directories_come_from_every_source(monkeypatch: pytest.MonkeyPatch):
    given = Settings(host_dirs=["data=/srv/data:ro", "out=/srv/a:b:rw:http"])
    assert [(each.name, str(each.path), each.writable, each.http) for each in given.host_dirs] == [
        ("data", "/srv/data", False, False),
        ("out", "/srv/a:b", True, True),
    ]
    monkeypatch.setattr("os.environ", environment(given))
    assert load_settings().host_dirs == given.host_dirs
