"""Many clients at once: each creates a sandbox when it is its turn, runs code in it, and closes it.

Each has its own token, because a client that fills the limits itself is refused instead of queued.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import anyio.to_thread
import psutil

from mcp_sandbox.accounts.accounts import Accounts
from mcp_sandbox.accounts.tokens import Tokens
from mcp_sandbox.commands.bench.http_client import RestClient, serving, took_ms
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import FIRST_CODE, MeasurementFailed, Subject
from vmm.process_table import tree_of

CLIENTS = 50
SANDBOXES = 8  # at once; the other clients wait
RUNS = 5  # in each sandbox
QUEUE_S = 300.0  # longer than a turn of all others
TIMES = 10.0  # p99 over p50
SETTLE_S = 30.0  # for machines that end in the background
POLL_S = 0.05


@dataclass(slots=True)
class Log:
    """What the clients have seen. Appending is all that they do, and that needs no lock."""

    turns: list[float] = field(default_factory=list)  # ms
    runs: list[float] = field(default_factory=list)  # ms
    errors: list[str] = field(default_factory=list)


async def measure(subject: Subject) -> Findings:
    """Let all clients work for the time of the plan, and see what is left when they have gone."""
    log = Log()
    limits = {"limits.sandboxes": SANDBOXES, "limits.queue_timeout_s": QUEUE_S, "pool.max": 2}
    with TemporaryDirectory() as home, closing(Tokens(Path(home))) as tokens:
        secrets = [tokens.create(f"client {number}") for number in range(CLIENTS)]
        async with serving(subject.settings.changed(limits), Accounts(tokens, subject.settings.oauth).find) as port:
            await _all(subject, port, secrets[:SANDBOXES], Log(), 0)  # the pool and caches fill up
            before = await _resources(None)
            await _all(subject, port, secrets, log, subject.plan.crowd_s)
            after = await _resources(before)
    if not log.turns:
        raise MeasurementFailed(f"No client got a turn: {log.errors[0]}")
    turns = figure(f"a turn of one of {CLIENTS} clients: create, {RUNS} runs, close", "ms", log.turns)
    runs = figure(f"a run over REST, with {CLIENTS} clients", "ms", log.runs)
    example = f", such as: {log.errors[0]}" if log.errors else ""
    promises = [Promise(f"errors of {CLIENTS} clients{example}", len(log.errors), 0, "errors")]
    promises += [Promise(f"{each.name}: p99 over p50", each.p99 / each.p50, TIMES, "times") for each in (turns, runs)]
    promises += [
        Promise(f"{CLIENTS} clients: {name}, from {early} to {after[name]}", after[name] - early, 0, "more")
        for name, early in before.items()
    ]
    return Findings([turns, runs], promises)


async def _all(subject: Subject, port: int, secrets: Sequence[str], log: Log, seconds: float) -> None:
    until = time.monotonic() + seconds
    threads = anyio.CapacityLimiter(CLIENTS)
    subject.progress(f"{CLIENTS} clients at once, for {seconds:.0f} s and one turn more")
    async with anyio.create_task_group() as tasks:
        for secret in secrets:
            work = partial(_client, port, secret, log, until)
            tasks.start_soon(partial(anyio.to_thread.run_sync, work, limiter=threads))


def _client(port: int, secret: str, log: Log, until: float) -> None:
    """Take turns until the time is up, and one at least."""
    with RestClient(port, secret) as rest:
        while True:
            try:
                log.turns.append(took_ms(lambda: _turn(rest, log)))
            except (MeasurementFailed, OSError) as error:
                log.errors.append(str(error))
                return
            if time.monotonic() >= until:
                return


def _turn(rest: RestClient, log: Log) -> None:
    box = rest.create()
    for _ in range(RUNS):
        log.runs.append(took_ms(lambda: rest.run(box, FIRST_CODE)))
    rest.ask("DELETE", box)


async def _resources(settled: dict[str, int] | None) -> dict[str, int]:
    """Count what this process uses: when it has not changed for a second, or is down to what it was."""
    last, since, end = _count(), anyio.current_time(), anyio.current_time() + SETTLE_S
    while anyio.current_time() < min(end, since + 1.0):
        await anyio.sleep(POLL_S)
        now = _count()
        if settled is not None and all(now[name] <= settled[name] for name in settled):
            return now
        if now != last:
            last, since = now, anyio.current_time()
    return last


def _count() -> dict[str, int]:
    process = psutil.Process()
    return {"processes": len(tree_of(os.getpid())), "descriptors": process.num_fds()}
