"""The control socket, through which operators talk to their running servers."""

import json
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketStream

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxNotFound
from mcp_sandbox.operating import control
from mcp_sandbox.operating.control import (
    MAX_CLIENTS,
    ControlError,
    Request,
    ServerGone,
    ask,
    live_servers,
    serve_control,
)
from mcp_sandbox.operating.metrics import Metrics
from mcp_sandbox.operating.operation import ServicePanel
from mcp_sandbox.operating.registry import open_registry
from mcp_sandbox.sandboxes.service import SandboxService
from tests.unit.fakes import TEMPLATE, FakeProvider
from vmm.process_table import ProcessId, of_pid


def myself() -> ProcessId:
    process = of_pid(os.getpid())
    assert process is not None
    return process


class FakePanel:
    def sandboxes(self) -> list[Mapping[str, object]]:
        return [{"id": "sb-1"}]

    async def close(self, sandbox_id: str) -> bool:
        if sandbox_id != "sb-1":
            raise SandboxNotFound(sandbox_id)
        return True

    def stats(self) -> Mapping[str, object]:
        raise RuntimeError("a mistake of ours")

    async def metrics(self) -> str:
        return "numbers"


@pytest.fixture
async def run_dir(tmp_path: Path) -> AsyncIterator[Path]:
    """The directory of a listening server, with a path longer than a socket's path may be."""
    run_dir = tmp_path / ("long" * 30) / "run"
    async with serve_control(run_dir, myself(), FakePanel()):
        yield run_dir


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """This process cannot open files within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def asked(run_dir: Path, **request: Any) -> Any:
    work: Callable[[], Any] = partial(ask, run_dir, myself(), Request(**request), timeout_s=10)
    with anyio.fail_after(10):
        return await anyio.to_thread.run_sync(work)


async def raw(run_dir: Path, line: bytes) -> dict[str, Any]:
    [path] = run_dir.iterdir()

    def talk() -> bytes:
        with control._short_path(run_dir) as directory, socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(10)
            wire.connect(f"{directory}/{path.name}")
            wire.sendall(line)
            wire.shutdown(socket.SHUT_WR)
            return wire.makefile("rb").readline()

    answer: dict[str, Any] = json.loads(await anyio.to_thread.run_sync(talk))
    return answer


async def test_a_server_answers_all_requests(run_dir: Path):
    assert await asked(run_dir, do="list") == [{"id": "sb-1"}]
    assert await asked(run_dir, do="close", sandbox_id="sb-1") is True
    assert await asked(run_dir, do="metrics") == "numbers"


async def test_only_the_servers_user_can_open_the_socket_and_it_is_removed_with_the_server(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)
    async with serve_control(run_dir, myself(), FakePanel()):
        [path] = run_dir.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        assert live_servers(run_dir) == [myself()]
    assert list(run_dir.iterdir()) == []


async def test_an_error_of_the_server_reaches_the_operator(run_dir: Path):
    with pytest.raises(ControlError, match="'sb-2' does not exist"):
        await asked(run_dir, do="close", sandbox_id="sb-2")


async def test_a_bug_in_the_server_is_an_answer_and_does_not_end_it(run_dir: Path):
    with pytest.raises(ControlError, match="a mistake of ours"):
        await asked(run_dir, do="stats")
    assert await asked(run_dir, do="metrics") == "numbers"


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[1, 2]\n",
        b'{"do": "explode"}\n',
        b'{"do": "list", "more": 1}\n',
        b'{"do": "close", "sandbox_id": "' + b"x" * 200 + b'"}\n',
        b"x" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"[" * 4000 + b"\n",
        b'{"do":' + b"9" * 4080 + b"}\n",
        b"no end",
        b"",
    ],
    ids=[
        "empty",
        "list",
        "unknown",
        "extra",
        "long id",
        "long line",
        "no text",
        "deep nesting",
        "many digits",
        "no newline",
        "silence",
    ],
)
async def test_a_malformed_request_is_refused(run_dir: Path, line: bytes):
    try:
        answer = await raw(run_dir, line)
    except OSError:  # the server hung up before everything was sent
        answer = {"ok": False}
    assert answer["ok"] is False
    assert await asked(run_dir, do="metrics") == "numbers"


async def test_silent_clients_do_not_block_others(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "IO_TIMEOUT_S", 0.2)
    [path] = run_dir.iterdir()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CLIENTS)]
    try:
        with control._short_path(run_dir) as directory:
            for wire in silent:
                wire.connect(f"{directory}/{path.name}")
        with anyio.fail_after(10):
            while True:
                try:
                    assert await asked(run_dir, do="metrics") == "numbers"
                    break
                except ServerGone:
                    continue
    finally:
        for wire in silent:
            wire.close()


async def test_a_server_out_of_file_descriptors_recovers(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(control, "ACCEPT_RETRY_S", 0.01)
    [path] = run_dir.iterdir()
    with control._short_path(run_dir) as directory, socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(10)
        with no_more_descriptors(), anyio.fail_after(10):
            wire.connect(f"{directory}/{path.name}")
            while "cannot accept connections" not in caplog.text:
                await anyio.sleep(0.01)
        wire.sendall(b'{"do": "metrics"}\n')
        answer = await anyio.to_thread.run_sync(wire.makefile("rb").readline)
    assert json.loads(answer) == {"ok": True, "result": "numbers"}
    assert "Too many open files" in caplog.text


async def test_requests_that_hang_get_an_answer_and_free_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class HangingPanel(FakePanel):
        async def close(self, sandbox_id: str) -> bool:
            await anyio.sleep_forever()
            return True

    monkeypatch.setattr(control, "WORK_TIMEOUT_S", 0.2)
    async with serve_control(tmp_path, myself(), HangingPanel()):

        async def hang() -> None:
            with pytest.raises(ControlError, match="still working on the request"):
                await asked(tmp_path, do="close", sandbox_id="sb-1")

        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_CLIENTS):
                tasks.start_soon(hang)
        assert await asked(tmp_path, do="metrics") == "numbers"


async def test_asking_a_server_that_is_gone_raises_server_gone(tmp_path: Path):
    with pytest.raises(ServerGone, match="does not answer"):
        await asked(tmp_path, do="list")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1-1-control").touch()
    assert live_servers(tmp_path / "run") == []


@pytest.mark.parametrize("answer", [b"", b"[" * 100_000, b"9" * 100_000, b"[]", b"{}", b'{"ok": true}', b"\xff"])
async def test_an_answer_that_makes_no_sense_is_no_answer(tmp_path: Path, answer: bytes):
    server = myself()

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer + b"\n")

    async with (
        await anyio.create_unix_listener(tmp_path / f"{server.pid}-{server.started}-control") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, serve)
        with pytest.raises(ServerGone, match="does not answer"):
            await asked(tmp_path, do="list")
        tasks.cancel_scope.cancel()


async def test_a_server_without_a_control_socket_still_works(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "run").touch()
    async with serve_control(tmp_path / "run", myself(), FakePanel()):
        pass
    assert "cannot reach this server" in caplog.text
    assert (tmp_path / "run").is_file()


@asynccontextmanager
async def panel_of_a_service(home: Path) -> AsyncIterator[tuple[ServicePanel, SandboxService]]:
    async with open_registry(home) as registry, SandboxService(FakeProvider(), Settings(home=home)) as service:
        yield ServicePanel(service, registry, Metrics(registry.own), lambda: [{"template": TEMPLATE}]), service


async def test_an_operator_sees_and_closes_the_sandboxes_of_all_owners(tmp_path: Path):
    async with panel_of_a_service(tmp_path) as (panel, service):
        one, two = await service.create("one"), await service.create("two")
        assert [(row["sandbox_id"], row["owner"], row["state"]) for row in panel.sandboxes()] == [
            (one.sandbox_id, "one", "ready"),
            (two.sandbox_id, "two", "ready"),
        ]
        assert json.loads(json.dumps(panel.sandboxes()))[0]["template"] == TEMPLATE
        assert await panel.close(one.sandbox_id)
        assert [row["sandbox_id"] for row in panel.sandboxes()] == [two.sandbox_id]
        with pytest.raises(SandboxNotFound):
            await panel.close(one.sandbox_id)


async def test_the_stats_of_a_server_include_machines_and_pools(tmp_path: Path):
    async with panel_of_a_service(tmp_path) as (panel, _):
        await panel.registry.starting("m-1", TEMPLATE)
        stats = json.loads(json.dumps(panel.stats()))
        assert stats["machines"] == {"starting": 1, "running": 0, "ending": 0}
        assert stats["pools"] == [{"template": TEMPLATE}]
        assert "mcp_sandbox_machines" in await panel.metrics()
