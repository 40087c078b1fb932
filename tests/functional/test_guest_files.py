"""File requests through a real agent."""

import datetime
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import FileInfo, RunCode
from guest.errors import RequestRefused
from tests.functional.guest_harness import SEPARATE_USER, agent_client, run
from tests.waiting import HANG_S

LIMIT_S = HANG_S


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client() as client:
        yield client


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    with anyio.fail_after(LIMIT_S):
        yield


async def refused(call) -> str:
    with pytest.raises(RequestRefused) as caught:
        await call
    return caught.value.code


@pytest.mark.parametrize(
    "data",
    [b"", b"hello\n", bytes(range(256)), b"MCSB" * 100, os.urandom(1024 * 1024), os.urandom(20_000_000)],
    ids=["empty", "text", "binary", "magic", "one frame", "large"],
)
async def test_what_is_written_is_read_back(machine, data):
    info = await machine.write("round/trip.bin", data)
    assert (info.path, info.kind, info.size) == ("/workspace/round/trip.bin", "file", len(data))
    chunk = await machine.read("round/trip.bin", limit=30_000_000)
    assert chunk.data == data
    assert chunk.size == len(data)
    assert chunk.eof


async def test_the_code_sees_the_file_and_owns_it(machine):
    await machine.write("/workspace/mine.txt", b"from the host")
    result = await run(machine, "import os\nopen('mine.txt').read(), oct(os.stat('mine.txt').st_mode & 0o777)")
    assert result.shown == ["('from the host', '0o644')"]
    assert (await run(machine, "os.stat('mine.txt').st_uid == os.getuid()")).shown == ["True"]


async def test_a_file_is_read_in_pieces(machine):
    await machine.write("pieces", b"0123456789")
    first = await machine.read("pieces", limit=4)
    assert (first.data, first.size, first.eof) == (b"0123", 10, False)
    last = await machine.read("pieces", offset=4, limit=100)
    assert (last.data, last.eof) == (b"456789", True)
    beyond = await machine.read("pieces", offset=50, limit=100)
    assert (beyond.data, beyond.eof) == (b"", True)


async def test_a_file_is_replaced_in_one_step_and_keeps_its_mode(machine):
    await run(machine, "import os; open('log', 'w').write('old'); os.chmod('log', 0o640)\nold = open('log')")
    await machine.write("log", b"new")
    assert (await run(machine, "old.read(), open('log').read()")).shown == ["('old', 'new')"]
    assert (await run(machine, "import os; oct(os.stat('log').st_mode & 0o777)")).shown == ["'0o640'"]


async def test_writing_through_a_link_changes_what_it_points_to(machine):
    await run(machine, "import os; open('target', 'w').close(); os.symlink('target', 'link')")
    await machine.write("link", b"x")
    assert (await run(machine, "os.path.islink('link')")).shown == ["True"]
    assert (await machine.read("target", limit=10)).data == b"x"


async def test_an_abandoned_upload_leaves_nothing(machine):
    await machine.write("keep/file", b"old")
    with anyio.move_on_after(0.002):
        await machine.write("keep/file", b"x" * 30_000_000)
    listing = await machine.list("keep", recursive=False, max_entries=10)
    assert [entry.path for entry in listing.entries] == ["/workspace/keep/file"]


async def test_refusals_name_the_reason(machine):
    await machine.write("a-file", b"x")
    await run(machine, "import os; os.mkfifo('pipe')")
    assert await refused(machine.read("no/such/file", limit=1)) == "not_found"
    assert await refused(machine.list("nothing", recursive=False, max_entries=1)) == "not_found"
    assert await refused(machine.read("/workspace", limit=1)) == "is_directory"
    assert await refused(machine.write("/workspace", b"x")) == "is_directory"
    assert await refused(machine.read("pipe", limit=1)) == "not_a_file"
    assert await refused(machine.write("pipe", b"x")) == "not_a_file"
    assert await refused(machine.read("/dev/zero", limit=1)) == "not_a_file"
    assert await refused(machine.read("a-file/below", limit=1)) == "not_a_directory"
    assert await refused(machine.read("nul\0byte", limit=1)) == "bad_request"
    assert await refused(machine.read("x" * 300, limit=1)) == "bad_request"
    assert await refused(machine.write("/usr/evil", b"x")) == "denied"
    assert await refused(machine.write("/workspace/huge", b"x" * 250_000_000)) == "no_space"
    assert await refused(machine.read("huge", limit=1)) == "not_found"


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_file_requests_have_no_more_privileges_than_code(machine):
    assert await refused(machine.write("/etc/new", b"x")) == "denied"
    with pytest.raises(RequestRefused, match=r"may not write to the directory /etc$"):
        await machine.write("/etc/new/file", b"x")
    await run(machine, "import os; os.mkdir('closed', 0)")
    with pytest.raises(RequestRefused, match=r"may not read /workspace/closed$"):
        await machine.list("closed", recursive=False, max_entries=1)
    with pytest.raises(RequestRefused, match=r"may not enter /workspace/closed$"):
        await machine.read("closed/file", limit=1)


async def test_a_file_where_a_directory_is_needed_is_named(machine):
    await machine.write("plain", b"x")
    for call in (
        machine.list("plain", recursive=False, max_entries=1),
        machine.write("plain/below/it", b"x"),
        machine.read("plain/below/it", limit=1),
        machine.make_folder("plain/below"),
        machine.make_folder("plain"),
    ):
        with pytest.raises(RequestRefused, match=r"^/workspace/plain$") as caught:
            await call
        assert caught.value.code == "not_a_directory"


async def test_data_is_appended_whole_or_not_at_all(machine):
    assert (await machine.write("grows", b"one ", append=True)).size == 4
    large = os.urandom(3_000_000)
    assert (await machine.write("grows", large, append=True)).size == 3_000_004
    assert (await machine.read("grows", limit=4_000_000)).data == b"one " + large
    assert await refused(machine.write("grows", b"x" * 250_000_000, append=True)) == "no_space"
    listing = await machine.list("/workspace", recursive=False, max_entries=100)
    assert [entry.size for entry in listing.entries if "grows" in entry.path] == [3_000_004]
    await run(machine, "import os; os.symlink('grows', 'to-grows')")
    assert (await machine.write("to-grows", b"!", append=True)).size == 3_000_005


async def test_a_listing_is_sorted_complete_and_bounded(machine):
    code = """import os
os.makedirs('tree/sub/deep', exist_ok=True)
for i in range(20): open(f'tree/f{i:02}', 'w').write('x' * i)
open('tree/sub/deep/leaf', 'w').close()
os.symlink('/', 'tree/loop')
os.mkfifo('tree/odd')"""
    await run(machine, code)
    flat = await machine.list("tree", recursive=False, max_entries=100)
    assert not flat.truncated
    kinds = {entry.path.removeprefix("/workspace/tree/"): entry.kind for entry in flat.entries}
    assert len(kinds) == 23
    assert (kinds["sub"], kinds["loop"], kinds["odd"], kinds["f07"]) == ("dir", "link", "other", "file")
    assert next(entry for entry in flat.entries if entry.path.endswith("f07")).size == 7
    deep = await machine.list("tree", recursive=True, max_entries=100)
    assert "/workspace/tree/sub/deep/leaf" in [entry.path for entry in deep.entries]
    cut = await machine.list("tree", recursive=True, max_entries=5)
    assert cut.truncated
    assert [entry.path for entry in cut.entries] == [f"/workspace/tree/f{i:02}" for i in range(5)]


async def test_a_listing_goes_on_after_the_entries_that_are_skipped(machine):
    code = """import os
for i in range(3):
    os.makedirs(f'pages/{i}')
    for j in range(400): open(f'pages/{i}/{j:03}' + 'x' * 200, 'w').close()"""
    await run(machine, code)
    found: list[str] = []
    truncated = True
    while truncated:
        page = await machine.list("pages", recursive=True, max_entries=10_000, skip=len(found))
        assert 0 < len(page.entries) < 500  # a page has 64 KiB
        found += [entry.path for entry in page.entries]
        truncated = page.truncated
    assert len(found) == len(set(found)) == 3 + 3 * 400
    flat = await machine.list("pages/1", recursive=False, max_entries=3, skip=398)
    assert [entry.path[19:22] for entry in flat.entries] == ["398", "399"]
    assert not flat.truncated
    beyond = await machine.list("pages", recursive=False, max_entries=3, skip=2**31)
    assert (beyond.entries, beyond.truncated) == ((), False)


async def test_odd_names_can_be_listed(machine):
    await run(
        machine, r"import os; os.makedirs('odd'); open(b'odd/\xff\xfe', 'w').close(); open('odd/ü €', 'w').close()"
    )
    listing = await machine.list("odd", recursive=False, max_entries=10)
    paths = [entry.path for entry in listing.entries]
    assert "/workspace/odd/ü €" in paths
    assert all(path.encode() for path in paths)
    assert (await machine.read("odd/ü €", limit=1)).size == 0


async def test_files_are_served_while_code_runs(machine):
    async with machine.run(RunCode("print('on')\nwhile True: pass")) as events:
        await anext(events)
        data = os.urandom(3_000_000)
        await machine.write("meanwhile", data)
        assert (await machine.read("meanwhile", limit=10_000_000)).data == data


async def test_many_requests_at_once_each_get_their_own_answer(machine):
    answers: dict[int, bytes] = {}

    async def one(number: int) -> None:
        await machine.write(f"many/{number}", str(number).encode() * 1000)
        answers[number] = (await machine.read(f"many/{number}", limit=100_000)).data

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(one, number)
    assert answers == {number: str(number).encode() * 1000 for number in range(40)}


async def test_a_file_time_beyond_all_calendars_is_clamped(machine):
    for time in (4 * 10**18, -4 * 10**18):
        await run(machine, f"import os; p = '/dev/shm/{time}'; open(p, 'w').close(); os.utime(p, (0, {time}))")
    times = [entry.mtime for entry in (await machine.list("/dev/shm", recursive=False, max_entries=10)).entries]
    assert len(times) == 2
    assert all(datetime.datetime.fromtimestamp(time, datetime.UTC) for time in times)


async def test_a_write_describes_the_file(machine):
    info = await machine.write("facts", b"12345")
    assert info == FileInfo("/workspace/facts", "file", 5, info.mtime)
    assert info.mtime > 1_600_000_000
