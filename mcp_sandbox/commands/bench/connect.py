"""`mcp-sandbox --connect`: how soon it answers, and what it adds to a call of a shared server."""

import sys
from subprocess import Popen

import anyio.to_thread

from mcp_sandbox.commands.bench.http_client import call_over_http, mcp_call, serving, took_ms
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.commands.common import SERVER_ARGS
from mcp_sandbox.connect.link import Link
from vmm.process import probe_child

CALL = mcp_call(NO_OP, {})


async def measure(subject: Subject) -> Findings:
    """Measure with a server in this process and without machines."""
    async with serving(subject.settings.changed({"pool.max": 0})) as port:
        return await anyio.to_thread.run_sync(_measure, subject, f"http://127.0.0.1:{port}/mcp")


def _measure(subject: Subject, url: str) -> Findings:
    argv = [sys.executable, *SERVER_ARGS, "--connect", url]
    starts = []
    for number in range(subject.plan.restores):
        subject.progress(f"starts of --connect: {number} of {subject.plan.restores}")
        starts.append(took_ms(lambda: _first_answer(argv)))
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
    with probe_child(argv) as relay:
        _ask(relay)  # it starts
        for number in range(subject.plan.calls):
            subject.progress(f"calls through --connect: {number} of {subject.plan.calls}")
            direct.append(took_ms(lambda: call_over_http(link, CALL)))
            relayed.append(took_ms(lambda: _ask(relay)))
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
