"""REST over a real server and real machines: reconnecting in a run, large files, and clients that leave."""

import hashlib
import io
import re
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx2
import pytest
from anyio.abc import Process

from tests.functional.test_http_server import serving
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

MB = 1 << 20
FILE_MB = 64
GROWTH_MB = 32  # of the server, while the file passes through it
WAITS = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('two')"
ENDLESS = "import time\nopen('started', 'w').close()\ntime.sleep(600)"


class Rest(NamedTuple):
    """A server, a client of it, and a sandbox."""

    server: Process
    client: httpx2.AsyncClient
    box: str

    async def names(self) -> list[str]:
        listed = (await self.client.get(f"{self.box}/files")).json()
        return [entry["path"].rpartition("/")[2] for entry in listed["entries"]]

    async def appears(self, name: str) -> None:
        with anyio.fail_after(HANG_S):
            while name not in await self.names():
                pass


@asynccontextmanager
async def opened() -> AsyncIterator[Rest]:
    async with serving() as (process, address):
        root = address.removesuffix("/mcp") + "/api/v1"
        async with httpx2.AsyncClient(base_url=root, timeout=HANG_S) as client:
            box = (await client.post("/sandboxes")).raise_for_status().json()["sandbox_id"]
            yield Rest(process, client, f"/sandboxes/{box}")


async def read_events(rest: Rest, run: str, last_id: str | None, until: str) -> tuple[str, list[str]]:
    """Follow a run until an event of this kind; returns the id of the last event, and the data of all."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    data: list[str] = []
    async with rest.client.stream("GET", f"{run}/events", headers=headers) as answer:
        kind = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                last_id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif kind == until:
                break
    assert last_id is not None
    return last_id, data


async def test_a_client_that_reconnects_during_a_run_gets_the_rest_of_its_output():
    async with opened() as rest:
        started = await rest.client.post(f"{rest.box}/runs", json={"code": WAITS, "background": True})
        run = started.headers["Location"].removeprefix("/api/v1")
        last_id, first = await read_events(rest, run, None, "output")
        assert [re.findall(r'"text":"(.*?)"', data) for data in first] == [[r"one\n"]]
        await rest.client.put(f"{rest.box}/files/content?path=go")
        last_id, rest_of_it = await read_events(rest, run, last_id, "result")
        assert r'"text":"two\n"' in rest_of_it[0]
        assert '"status":"ok"' in rest_of_it[-1]
        assert "one" not in "".join(rest_of_it[:-1])
        assert (await rest.client.get(f"{run}/events", headers={"Last-Event-ID": last_id})).status_code == 204


async def test_a_run_ends_with_the_client_that_waits_for_it():
    async with opened() as rest:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: rest.client.post(f"{rest.box}/runs", json={"code": ENDLESS, "timeout_s": 600}))
            await rest.appears("started")
            tasks.cancel_scope.cancel()
        with anyio.fail_after(HANG_S):  # the sandbox is busy until then
            while (await rest.client.post(f"{rest.box}/runs", json={"code": "1"})).status_code == 409:
                pass


async def test_a_run_with_a_key_goes_on_without_its_client_and_its_answer_waits():
    async with opened() as rest:
        keyed = {"Idempotency-Key": "only once"}
        code = {"code": f"open('started', 'a').write('x')\n{WAITS}\nprint(open('started').read())"}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: rest.client.post(f"{rest.box}/runs", json=code, headers=keyed))
            await rest.appears("started")
            tasks.cancel_scope.cancel()
        await rest.client.put(f"{rest.box}/files/content?path=go")
        answer = await rest.client.post(f"{rest.box}/runs", json=code, headers=keyed)
        assert answer.json()["stdout"]["head"] == "one\ntwo\nx\n"


def blocks(count: int) -> Iterator[bytes]:
    """Different blocks of a megabyte each."""
    for number in range(count):
        yield hashlib.sha256(str(number).encode()).digest() * (MB // 32)


async def upload(rest: Rest, path: str, megabytes: int) -> None:
    async def content() -> AsyncIterator[bytes]:
        for block in blocks(megabytes):
            yield block

    answer = await rest.client.put(f"{rest.box}/files/content?path={path}", content=content())
    assert answer.json()["size"] == megabytes * MB


async def download(rest: Rest, path: str) -> str:
    """The hash of a file."""
    found = hashlib.sha256()
    async with rest.client.stream("GET", f"{rest.box}/files/content?path={path}") as answer:
        async for part in answer.aiter_bytes():
            found.update(part)
    return found.hexdigest()


def memory_mb(process: Process, field: str) -> float:
    """What the kernel says about the memory of a process: VmRSS is now, VmHWM the most so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024


async def test_a_large_file_goes_in_and_out_without_being_held_in_memory():
    async with opened() as rest:
        await upload(rest, "small", 3)  # what the first transfer allocates stays
        await download(rest, "small")
        before = memory_mb(rest.server, "VmRSS")
        Path(f"/proc/{rest.server.pid}/clear_refs").write_text("5")  # VmHWM begins anew
        await upload(rest, "large", FILE_MB)
        expected = hashlib.sha256()
        for block in blocks(FILE_MB):
            expected.update(block)
        assert await download(rest, "large") == expected.hexdigest()
        assert memory_mb(rest.server, "VmHWM") - before < GROWTH_MB
        part = {"Range": f"bytes={40 * MB}-{40 * MB + 99}"}
        answer = await rest.client.get(f"{rest.box}/files/content?path=large", headers=part)
        assert (answer.status_code, answer.content) == (206, list(blocks(41))[40][:100])


TREE = """
import os, pathlib
os.makedirs("p/sub/deep"); os.mkdir("p/empty")
pathlib.Path("p/a é.txt").write_text("a"); pathlib.Path("p/sub/deep/b").write_bytes(bytes(3 << 20))
os.symlink("/etc/passwd", "p/link"); os.mkfifo("p/pipe")
for number in range(600): pathlib.Path(f"p/sub/{number}").write_text(str(number))
"""
LISTED = "import os\nprint(sorted((root, len(files), sorted(folders)) for root, folders, files in os.walk('q')))"


async def test_a_directory_goes_out_as_a_tar_archive_and_in_again():
    async with opened() as rest:
        await rest.client.post(f"{rest.box}/runs", json={"code": TREE})
        archive = (await rest.client.get(f"{rest.box}/files/archive?path=p")).raise_for_status().content
        with tarfile.open(fileobj=io.BytesIO(archive)) as found:
            names = set(found.getnames())
            assert len(found.extractfile("sub/deep/b").read()) == 3 << 20  # type: ignore[union-attr]
        numbers = {f"sub/{number}" for number in range(600)}
        assert names == {"a é.txt", "empty", "sub", "sub/deep", "sub/deep/b"} | numbers
        answer = (await rest.client.put(f"{rest.box}/files/archive?path=q", content=archive)).json()
        assert (answer["files"], answer["directories"], answer["skipped"]) == (602, 3, 0)
        run = await rest.client.post(f"{rest.box}/runs", json={"code": LISTED})
        expected = [("q", 1, ["empty", "sub"]), ("q/empty", 0, []), ("q/sub", 600, ["deep"]), ("q/sub/deep", 1, [])]
        assert run.json()["stdout"]["head"] == f"{expected}\n"
        taken = await rest.client.put(f"{rest.box}/files/archive?path=q/sub/1", content=archive)
        assert (taken.status_code, taken.json()["code"]) == (422, "wrong_file_kind")
