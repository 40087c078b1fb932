"""The server as a process: it speaks on stdio, and whatever ends it, it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.waiting import promised

ROOT = Path(__file__).parents[2]
SERVER = (sys.executable, "-m", "tests.functional.stdio_fake")

# A client between the test and the server: it starts the server on its own stdin and stdout, and waits.
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class RawClient:
    """Speaks JSON-RPC lines, so that nothing of the SDK's own clean-up gets in the way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._last_id = 0

    def send(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self._last_id

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = self.send(method, params)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)  # every line on the wire is a message
            if message.get("id") == number:
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError("the server closed its stdout")

    def start(self) -> str:
        """Shake hands and create a sandbox."""
        client = {"name": "raw", "version": "0"}
        self.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        assert self.process.stdin is not None
        self.process.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        result = self.ask("tools/call", {"name": "create_sandbox", "arguments": {}})
        sandbox_id: str = result["structuredContent"]["sandbox_id"]
        return sandbox_id


@contextmanager
def started(directory: Path, *prefix: str) -> Iterator[RawClient]:
    process = subprocess.Popen(
        [*prefix, *SERVER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield RawClient(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # what was not read any more
                pipe.close()  # type: ignore[union-attr]


def machines(directory: Path) -> list[Path]:
    return list(directory.glob("machine-*"))


def gone_in_time(pid: int) -> bool:
    """Wait for a process that may not be our child."""
    try:
        psutil.Process(pid).wait(promised())
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_and_all_machines(tmp_path: Path, number: signal.Signals):
    with started(tmp_path) as client:
        client.start()
        assert len(machines(tmp_path)) == 1
        client.process.send_signal(number)
        assert client.process.wait(promised()) == 0
    assert machines(tmp_path) == []


@pytest.mark.parametrize("code", ["forever", "stubborn"])
def test_the_end_of_stdin_ends_a_server_in_the_middle_of_a_run(tmp_path: Path, code: str):
    with started(tmp_path) as client:
        box = client.start()
        client.send("tools/call", {"name": "run_code", "arguments": {"code": code, "sandbox_id": box}})
        assert client.process.stdin is not None
        client.process.stdin.close()
        assert client.process.wait(promised()) == 0
    assert machines(tmp_path) == []


def test_a_signal_ends_a_server_in_the_middle_of_a_run(tmp_path: Path):
    with started(tmp_path) as client:
        box = client.start()
        client.send("tools/call", {"name": "run_code", "arguments": {"code": "forever", "sandbox_id": box}})
        client.process.terminate()
        assert client.process.wait(promised()) == 0
    assert machines(tmp_path) == []


def test_the_server_ends_with_its_parent_even_if_stdin_stays_open(tmp_path: Path):
    with started(tmp_path, sys.executable, "-c", PARENT) as client:
        client.start()
        server = int((tmp_path / "server.pid").read_text())
        assert server != client.process.pid
        client.process.kill()
        client.process.wait()
        assert gone_in_time(server)
    assert machines(tmp_path) == []


def test_a_client_that_stops_reading_does_not_keep_the_server(tmp_path: Path):
    with started(tmp_path) as client:
        client.start()
        for _ in range(200):  # answers to these fill the pipe
            client.send("tools/list", {})
        client.process.terminate()
        assert client.process.wait(promised()) == 0
    assert machines(tmp_path) == []


def test_answers_larger_than_the_pipe_arrive_whole(tmp_path: Path):
    with started(tmp_path) as client:
        box = client.start()
        content = "é" * 1_000_000
        arguments = {"sandbox_id": box, "path": "big", "content": content}
        written = client.ask("tools/call", {"name": "write_file", "arguments": arguments})
        assert written["structuredContent"]["size"] == 2_000_000
        read = client.ask("resources/read", {"uri": f"sandbox://{box}/workspace/big"})
        assert read["contents"][0]["text"] == content


async def test_the_sdks_own_client_gets_along_with_it(tmp_path: Path):
    environment = {"PATH": os.environ["PATH"]}
    parameters = StdioServerParameters(command=SERVER[0], args=[*SERVER[1:], str(tmp_path)], cwd=ROOT, env=environment)
    async with Client(parameters) as client:
        result = await client.call_tool("run_code", {"code": "1+1"})
        assert not result.is_error
    assert gone_in_time(int((tmp_path / "server.pid").read_text()))
    assert machines(tmp_path) == []
