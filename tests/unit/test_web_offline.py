"""What reads untrusted bytes has no network, no other process and no file to write."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from guest.web import search
from guest.web.errors import WebError
from guest.web.kinds import read
from guest.web.offline import Reader
from guest.web.providers import APIS, Found
from tests.waiting import HANG_S

Result = tuple[dict[str, Any], bytes]


def run_offline(work: Callable[[], Result], timeout_s: float = HANG_S) -> Result:
    with Reader(lambda _fields, _data: work()) as reader:
        return reader.read({}, b"", timeout_s=timeout_s)


def code_of(work: Callable[[], Any]) -> str:
    with pytest.raises(WebError) as failed:
        run_offline(work)
    return failed.value.code


def test_work_gets_a_download_and_returns_a_header_and_a_body():
    with Reader(lambda fields, data: ({"a": fields["a"]}, data + b"!")) as reader:
        assert reader.read({"a": 1}, b"x" * 3_000_000, timeout_s=HANG_S) == ({"a": 1}, b"x" * 3_000_000 + b"!")


def test_an_error_of_the_work_arrives_as_it_is():
    def fail() -> Result:
        raise WebError("too_large", "it is large", limit=3)

    with pytest.raises(WebError, match="it is large") as failed:
        run_offline(fail)
    assert (failed.value.code, failed.value.fields) == ("too_large", {"limit": 3})


def attempts() -> dict[str, Any]:
    """Return forbidden things to do, by name."""
    return {
        "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "unix socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        "kill": lambda: os.kill(os.getppid(), 0),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "file": lambda: Path("/tmp/written").write_text("x"),
        "pidfd": lambda: os.pidfd_open(os.getppid()),
    }


@pytest.mark.parametrize("name", list(attempts()))
def test_the_process_can_do_nothing_to_the_outside(name: str):
    def attempt() -> Result:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            attempts()[name]()
        except OSError as error:
            return {"errno": error.errno}, b""
        return {"errno": None}, b""

    assert run_offline(attempt)[0]["errno"] is not None


def test_descriptors_of_the_parent_are_closed():
    peer, other = socket.socketpair()
    with peer, other:
        number = peer.fileno()

        def look() -> Result:
            try:
                os.fstat(number)
            except OSError:
                return {"open": False}, b""
            return {"open": True}, b""

        assert run_offline(look)[0] == {"open": False}


def test_work_that_takes_too_much_memory_is_an_error():
    assert code_of(lambda: ({}, bytes(2 << 30))) == "too_large"


def test_work_that_crashes_is_an_error():
    assert code_of(lambda: os._exit(3)) == "unreadable"
    assert code_of(lambda: 1 / 0) == "unreadable"


def test_work_that_does_not_end_is_killed():
    def hang() -> Result:
        time.sleep(HANG_S)
        return {}, b""

    with pytest.raises(WebError) as failed:
        run_offline(hang, timeout_s=0.1)
    assert failed.value.code == "timeout"


@pytest.mark.parametrize("provider", ["searxng", "duckduckgo"])
def test_answers_of_search_providers_are_read_without_a_network(provider: str, monkeypatch: pytest.MonkeyPatch):
    def network(*_: object) -> list[dict[str, str]]:
        try:
            socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        except OSError:
            return [{"title": "none"}]
        return [{"title": "some"}]

    api = APIS["searxng"]._replace(parse=lambda *_: Found(network()))
    monkeypatch.setitem(APIS, "searxng", api)
    monkeypatch.setattr("guest.web.duckduckgo.read", network)
    fields = {
        "kind": "search",
        "provider": provider,
        "query": "x",
        "count": 1,
        "page": 1,
        "endpoint": "http://search.example/",
    }
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    with Reader(read) as reader, httpx.Client(transport=transport) as client:
        header, _ = search.run(fields, client, reader)
    assert header["results"] == [{"title": "none"}]
