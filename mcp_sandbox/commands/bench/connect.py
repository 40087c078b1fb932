"""`mcp-sandbox --connect`: how soon it answers, and what it adds to a call of a shared server."""

import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from subprocess import Popen

import anyio
import anyio.to_thread

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.commands.common import SERVER_ARGS
from mcp_sandbox.config import Settings
from mcp_sandbox.connect.link import Link, events_in
from mcp_sandbox.connect.messages import VERSION_KEY, parse
from mcp_sandbox.serving.http import listening, opened_app, web_server
from vmm.process import probe_child

META = {VERSION_KEY: "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
CALL = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": NO_OP, "arguments": {}, "_meta": META},
    }
).encode()


async def measure(subject: Subject) -> Findings:
    """Measure with a server in this process and without machines."""
    changes = {"pool.max": 0, "serve.host": "127.0.0.1", "serve.port": 0, "serve.requests_per_minute": 1_000_000}
    async with _serving(subject.settings.changed(changes)) as url:
        return await anyio.to_thread.run_sync(_measure, subject, url)


@asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[str]:
    with listening(settings.serve) as listener:
        async with opened_app(settings, None) as face, anyio.create_task_group() as tasks:
            web = web_server(face.gate, settings.serve)
            tasks.start_soon(partial(web.serve, sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
            finally:
                web.should_exit = True


def _measure(subject: Subject, url: str) -> Findings:
    argv = [sys.executable, *SERVER_ARGS, "--connect", url]
    starts = []
    for number in range(subject.plan.restores):
        subject.progress(f"starts of --connect: {number} of {subject.plan.restores}")
        starts.append(_took_ms(lambda: _first_answer(argv)))
    direct, relayed = _calls(subject, argv, Link(url, None))
    figures = [
        figure("--connect: start to first answer", "ms", starts),
        figure("a tool that uses no machine, over HTTP", "ms", direct),
        figure("the same through --connect", "ms", relayed),
    ]
    start, over_http, through = figures
    promises = [
        Promise("--connect: start to first answer, p50", start.p50, 500, "ms"),
        Promise("--connect adds to a call", through.p50 - over_http.p50, 2, "ms"),
    ]
    return Findings(figures, promises)


def _calls(subject: Subject, argv: list[str], link: Link) -> tuple[list[float], list[float]]:
    """Time calls over HTTP and through a relay, in turn."""
    direct, relayed = [], []
    headers = parse(CALL).headers

    def over_http() -> None:
        connection = link.send("POST", headers, CALL)
        response = connection.getresponse()
        if response.headers.get_content_type() == "text/event-stream":
            list(events_in(response))
        response.read()
        link.give_back(connection, response)

    with probe_child(argv) as relay:
        _ask(relay)  # it starts
        for number in range(subject.plan.calls):
            subject.progress(f"calls through --connect: {number} of {subject.plan.calls}")
            direct.append(_took_ms(over_http))
            relayed.append(_took_ms(lambda: _ask(relay)))
    return direct, relayed


def _first_answer(argv: list[str]) -> None:
    with probe_child(argv) as relay:
        _ask(relay)


def _ask(relay: Popen[bytes]) -> None:
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(CALL + b"\n")
    relay.stdin.flush()
    relay.stdout.readline()


def _took_ms(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return 1000 * (time.monotonic() - began)
