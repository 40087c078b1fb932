"""Tar archives of directories: hostile archives, hostile listings, and what goes through REST."""

import io
import tarfile
from collections.abc import AsyncIterator

import httpx2
import pytest

from guest.client.messages import FileChunk, FileInfo, Listing
from guest.errors import RequestRefused
from mcp_sandbox.errors import BadRequest
from mcp_sandbox.sandboxes import archives
from mcp_sandbox.sandboxes.tar_stream import MAX_HEADER_BYTES, TarReader, pax_fields
from tests.unit.fakes import FakeAgent, FakeProvider
from tests.unit.rest_client import client_of, rest_over
from tests.unit.test_rest import problem

LONG = "d" * 90 + "/" + "é" * 90
MEMBERS = {"a.txt": b"hello", "sub/empty": b"", LONG: bytes(range(256)) * 8193}


def made(members: dict[str, bytes], form: int = tarfile.PAX_FORMAT, *more: tarfile.TarInfo) -> bytes:
    """An archive that Python makes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for special in more:
            archive.addfile(special)
    return target.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


async def in_parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def members_of(data: bytes, part: int = 1000) -> list[tuple[str, str, bytes]]:
    reader = TarReader(in_parts(data, part))
    found: list[tuple[str, str, bytes]] = []
    while (member := await reader.next()) is not None:
        found.append((member.name, member.kind, b"".join([part async for part in reader.content()])))
    return found


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("part", [1, 511, 100_000], ids=lambda part: f"parts of {part}")
async def test_the_members_of_an_archive_are_read_however_it_is_cut(form: int, part: int):
    small = {name: data[:3000] for name, data in MEMBERS.items()}
    archive = made(small, form, special("d", tarfile.DIRTYPE), special("l", tarfile.SYMTYPE, "x" * 200))
    files = [(name, "file", data) for name, data in small.items()]
    assert await members_of(archive, part) == [*files, ("d", "dir", b""), ("l", "other", b"")]


async def test_content_that_is_not_read_is_skipped():
    reader = TarReader(in_parts(made(MEMBERS), 700))
    names = []
    while (member := await reader.next()) is not None:
        names.append(member.name)
    assert names == list(MEMBERS)


def claiming(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("a")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * 2000, "not a tar archive"),
        (b"\x1f\x8b" + bytes(1000), "compressed"),
        (made(MEMBERS)[:700], "ends in the middle"),
        (made(MEMBERS)[:300], "ends in the middle"),
        (claiming(-5), "impossible size"),
        (claiming(2**61), "impossible size"),
        (claiming(MAX_HEADER_BYTES + 1, tarfile.XHDTYPE), "header of the archive"),
        (claiming(-1, tarfile.GNUTYPE_LONGNAME), "header of the archive"),
    ],
)
async def test_what_is_no_archive_is_refused(data: bytes, reason: str):
    with pytest.raises(BadRequest, match=reason):
        await members_of(data)


@pytest.mark.parametrize("data", [b"x", b"5 a=b\n", b"99 path=a\n", b"-6 a=b\n", b"2 a=b\n"])
def test_attributes_that_cannot_be_read_are_refused(data: bytes):
    with pytest.raises(BadRequest, match="attributes"):
        pax_fields(data)


# -- over REST ---------------------------------------------------------------------------------------------


def test_only_the_attributes_that_matter_are_kept():
    records = [b"12 path=a/b\n", b"9 size=7\n", b"22 GNU.sparse.major=1\n", b"13 comment=x\n"]
    assert pax_fields(b"".join(records)) == {"path": "a/b", "size": "7", "GNU.sparse": ""}


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[httpx2.AsyncClient]:
    async with rest_over(provider) as app, client_of(app) as client:
        yield client


@pytest.fixture
async def archive(client: httpx2.AsyncClient, provider: FakeProvider) -> str:
    """The path of a sandbox's archive."""
    box = (await client.post("/sandboxes")).json()["sandbox_id"]
    listed_as_tree(provider.agent)
    return f"/sandboxes/{box}/files/archive"


def listed_as_tree(agent: FakeAgent) -> None:
    """Let an agent list directories one by one, as a real one does."""

    async def listing(path: str, *, recursive: bool, max_entries: int, skip: int = 0) -> Listing:
        below = [name.removeprefix(f"{path}/") for name in agent.files if name.startswith(f"{path}/")]
        if not below:
            raise RequestRefused("not_found", f"{path} does not exist")
        found = [
            FileInfo(f"{path}/{name}", "file", 1, 1e9) if name in below else FileInfo(f"{path}/{name}", "dir", 0, 1e9)
            for name in sorted({name.partition("/")[0] for name in below})
        ]
        return Listing(tuple(found[skip : skip + max_entries]), len(found) > skip + max_entries)

    agent.list = listing  # type: ignore[method-assign]


def unpacked(data: bytes) -> dict[str, bytes | None]:
    """The members of an archive as Python finds them; directories have no content."""
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return {
            member.name: content.read() if (content := found.extractfile(member)) else None
            for member in found.getmembers()
        }


async def test_a_directory_comes_as_an_archive(client, archive: str, provider: FakeProvider, monkeypatch):
    monkeypatch.setattr(archives, "PAGE_ENTRIES", 2)
    files = {**MEMBERS, "sub/deep/x": b"x", "b": b"b", "c": b"c"}
    provider.agent.files.update({f"/workspace/p/{name}": data for name, data in files.items()})
    provider.agent.files["/workspace/other"] = b"not this"
    answer = await client.get(archive, params={"path": "p"})
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"] == "attachment"
    folders = dict.fromkeys(["sub", "sub/deep", "d" * 90])
    assert unpacked(answer.content) == {**files, **folders}


async def test_a_file_that_changes_meanwhile_has_its_first_size_and_one_that_is_gone_is_left_out(
    client, archive: str, provider: FakeProvider
):
    sizes = {"/workspace/grows": (5, b"1234567"), "/workspace/shrinks": (5, b"12"), "/workspace/stays": (1, b"s")}
    provider.agent.files.update(dict.fromkeys([*sizes, "/workspace/gone"], b""))

    async def read(path: str, *, offset: int = 0, limit: int) -> FileChunk:
        if path not in sizes:
            raise RequestRefused("not_found", "gone")
        size, data = sizes[path]
        return FileChunk(data[offset : offset + limit], size, eof=True)

    provider.agent.read = read  # type: ignore[method-assign]
    found = unpacked((await client.get(archive)).content)
    assert found == {"grows": b"12345", "shrinks": b"12\0\0\0", "stays": b"s"}


@pytest.mark.parametrize("named", ["/etc/passwd", "/workspace/../x", "/workspace/..", "/workspace/a/b", "/workspace/"])
async def test_a_listing_that_leads_elsewhere_ends_the_sandbox(
    client, archive: str, provider: FakeProvider, named: str
):
    async def hostile(path: str, *, recursive: bool, max_entries: int, skip: int = 0) -> Listing:
        return Listing((FileInfo(named, "file", 1, 0.0),), truncated=False)

    provider.agent.list = hostile  # type: ignore[method-assign]
    problem(await client.get(archive), 410, "machine_lost")


async def test_a_directory_that_is_not_there_is_a_problem(client, archive: str):
    problem(await client.get(archive, params={"path": "none"}), 404, "file_not_found")


async def test_an_archive_is_unpacked_and_what_leads_out_of_the_directory_is_reported(
    client, archive: str, provider: FakeProvider
):
    more = [
        special("empty/", tarfile.DIRTYPE),
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("hard", tarfile.LNKTYPE, "a.txt"),
        special("pipe", tarfile.FIFOTYPE),
    ]
    data = made({**MEMBERS, "../out": b"x", "/abs": b"x", "./dot/b": b"b"}, tarfile.PAX_FORMAT, *more)
    answer = (await client.put(archive, params={"path": "p"}, content=data)).json()
    expected = {f"/workspace/p/{name}": content for name, content in MEMBERS.items()}
    assert provider.agent.files == {**expected, "/workspace/p/dot/b": b"b"}
    assert provider.agent.folders == {"/workspace/p", "/workspace/p/empty"}
    assert (answer["files"], answer["directories"], answer["skipped"]) == (4, 1, 5)
    assert answer["size"] == sum(map(len, MEMBERS.values())) + 1
    assert {each["name"]: each["reason"].split()[0] for each in answer["skipped_members"]} == {
        "../out": "outside",
        "/abs": "outside",
        "link": "neither",
        "hard": "neither",
        "pipe": "neither",
    }


async def test_half_an_archive_leaves_no_half_file(client, archive: str, provider: FakeProvider):
    answer = await client.put(archive, content=made({"a": b"a", "b": bytes(3 << 20)})[: 2 << 20])
    assert "in the middle" in problem(answer, 400, "bad_request")["detail"]
    assert provider.agent.files == {"/workspace/a": b"a"}
    assert provider.agent.discarded == 1
