"""A server on stdio, as a client starts it: how soon it answers, has a sandbox, and has ended."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.commands.common import SERVER_ARGS, environment

PROTOCOL = "2025-11-25"
MOST_STARTS = 10  # each takes seconds
SETTLE_S = 5.0  # until the pools of all templates are full
WHO = {"name": "bench", "version": "1"}


class Start(NamedTuple):
    """Milliseconds from the start of the process, and those that its end took."""

    initialized: float
    tools_listed: float
    created: float
    closed: float  # after the client has closed stdin


async def measure(subject: Subject) -> Findings:
    """Start servers, one after the other."""
    starts, count = [], min(subject.plan.restores, MOST_STARTS)
    for number in range(count):
        subject.progress(f"starts of a server: {number} of {count}")
        starts.append(await anyio.to_thread.run_sync(_start, environment(subject.settings)))
    initialized, listed, created, closed = (list(times) for times in zip(*starts, strict=True))
    figures = [
        figure("start of a server to the answer of initialize", "ms", initialized),
        figure("start of a server to the answer of tools/list", "ms", listed),
        figure("start of a server to the first sandbox", "ms", created),
        figure("end of a server with machines", "ms", closed),
    ]
    promises = [
        Promise("start of a server to the answer of initialize, p50", figures[0].p50, 500, "ms"),
        Promise("start of a server to the first sandbox, p50", figures[2].p50, 1200, "ms"),
        Promise("end of a server with machines, p50", figures[3].p50, 300, "ms"),
    ]
    return Findings(figures, promises)


def _start(variables: dict[str, str]) -> Start:
    """Start a server, use it as a client does, and end it once its pools are full."""
    began = time.monotonic()

    def since() -> float:
        return 1000 * (time.monotonic() - began)

    with _server(variables) as server:
        _ask(server, "initialize", protocolVersion=PROTOCOL, capabilities={}, clientInfo=WHO)
        initialized = since()
        _send(server, {"method": "notifications/initialized"})
        _ask(server, "tools/list")
        listed = since()
        _ask(server, "tools/call", name="create_sandbox", arguments={})
        created = since()
        time.sleep(SETTLE_S)
        closing = since()
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        return Start(initialized, listed, created, since() - closing)


@contextmanager
def _server(variables: dict[str, str]) -> Iterator[Popen[bytes]]:
    with Popen([sys.executable, *SERVER_ARGS], stdin=PIPE, stdout=PIPE, env=variables) as server:
        try:
            yield server
        finally:
            server.kill()


def _ask(server: Popen[bytes], method: str, **params: object) -> None:
    """Send a request and wait for its answer. Raises MeasurementFailed unless it succeeds."""
    assert server.stdout is not None
    _send(server, {"id": method, "method": method, "params": params})
    for line in server.stdout:
        answer = json.loads(line)
        if answer.get("id") == method:
            if "result" not in answer or answer["result"].get("isError"):
                raise MeasurementFailed(f"{method} failed: {answer}")
            return
    raise MeasurementFailed("The server has ended.")


def _send(server: Popen[bytes], message: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    server.stdin.flush()
