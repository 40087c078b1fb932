"""The processes that wait for jobs: each serves one, and one that is lost is replaced."""

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

import anyio
import psutil
import pytest

from guest.web.errors import WebError
from guest.web.job import end_with
from guest.web.offline import Reader
from guest.web.workers import READY, SPARE, Tell, Workers
from tests.waiting import HANG_S
from tests.web.local_machine import LocalMachine, LocalMachines
from tests.web.sites import Page, pages
from tests.web.world import World, forget_proxies
from websearch.access import Caller
from websearch.singleton import Singleton

HELLO = Page(b"hello", headers={"Content-Type": "text/plain"})


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_proxies(monkeypatch)


class Fetching:
    """A site, and a machine that has fetched it once."""

    def __init__(self, web: Singleton, machine: LocalMachine, url: str) -> None:
        self._web = web
        self.machine = machine
        self._url = url

    async def fetch(self) -> bytes:
        fields = {"format": "text", "max_bytes": 1_000_000, "time_s": 60, "url": self._url}
        return (await self._web.run("fetch", fields, caller=Caller("ann", "web"), timeout_s=HANG_S)).body


@asynccontextmanager
async def fetching() -> AsyncIterator[Fetching]:
    world, machines = World(), LocalMachines()
    with anyio.fail_after(HANG_S):
        async with (
            world.site("site.example", pages({"/": HELLO})) as site,
            Singleton(machines, world.bridge_for) as web,
        ):
            start = {"format": "text", "max_bytes": 1_000_000, "time_s": 60, "url": f"{site}/"}
            await web.run("fetch", start, caller=Caller("ann", "web"), timeout_s=HANG_S)
            yield Fetching(web, machines.started[0], f"{site}/")


async def test_a_process_never_serves_two_jobs():
    async with fetching() as site:
        readers = set[int]()
        for number in range(4):
            await site.machine.wait_for_workers(1 + number + SPARE)
            readers |= {child.pid for pid in site.machine.workers[-SPARE:] for child in _children(pid)}
            assert await site.fetch() == b"hello"
        workers = site.machine.workers
        assert len(workers) >= 4
        assert len(set(workers)) == len(workers)  # every stream for a job comes from a process of its own
        assert len(readers) >= 4
        assert not readers & set(workers)


def test_a_process_that_has_read_one_download_reads_no_other():
    with Reader(lambda _fields, data: ({"pid": os.getpid()}, data)) as reader:
        header, body = reader.read({}, b"one", timeout_s=HANG_S)
        assert body == b"one"
        assert header["pid"] != os.getpid()
        with pytest.raises(WebError, match="died"):
            reader.read({}, b"two", timeout_s=HANG_S)


@pytest.mark.parametrize("part", ["worker", "reader"])
async def test_a_process_that_is_killed_while_it_waits_is_replaced(part: str):
    async with fetching() as site:
        machine = site.machine
        await machine.wait_for_workers(1 + SPARE)
        for pid in machine.workers[-SPARE:]:
            os.kill(pid if part == "worker" else _children(pid)[0].pid, signal.SIGKILL)
        await machine.wait_for_workers(1 + SPARE + SPARE)
        assert await site.fetch() == b"hello"


def test_a_process_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch):
    fork, tries = os.fork, []

    def fail_twice() -> int:
        tries.append(1)
        if len(tries) <= SPARE:
            raise OSError(12, "no memory")
        return fork()

    monkeypatch.setattr(os, "fork", fail_twice)
    with waiting(Workers(_wait)) as count:
        assert count == SPARE


async def test_a_job_that_the_host_gives_up_ends_with_the_process_that_reads():
    """Whatever it reads: six pages that take long would keep all later jobs out."""
    ours, theirs = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        try:
            ours.close()
            with Reader(lambda _fields, _data: _for_ever()) as reader:
                reader.wait()
                end_with(theirs)
                theirs.send(b"r")
                reader.read({}, b"", timeout_s=10 * HANG_S)
        finally:
            os._exit(1)
    theirs.close()
    assert ours.recv(1) == b"r"
    (reading,) = _children(worker)
    ours.close()
    with anyio.fail_after(HANG_S):
        assert await anyio.to_thread.run_sync(os.waitpid, worker, 0) == (worker, 0)
        await anyio.to_thread.run_sync(reading.wait)


def _for_ever() -> NoReturn:
    while True:
        pass


@contextmanager
def waiting(workers: Workers) -> Iterator[int]:
    """Start the processes; yields how many there are."""
    before = set(psutil.Process().children())
    try:
        workers.start()
        yield len(set(psutil.Process().children()) - before)
    finally:
        workers.stop()


def _wait(tell: Tell) -> None:
    tell(READY)
    signal.pause()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
