"""A server over HTTP: what a call costs over MCP and REST, large files, and many clients at once.

Server and clients are one process. So its memory is the memory of both, and their work slows each other down.
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
from mcp.client import Client

from mcp_sandbox.commands.bench import crowd
from mcp_sandbox.commands.bench.http_client import (
    CHUNK_BYTES,
    RestClient,
    call_over_http,
    mcp_call,
    serving,
    took_ms,
)
from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP
from mcp_sandbox.commands.bench.subject import FIRST_CODE, MeasurementFailed, Subject, run_code
from mcp_sandbox.connect.link import Link
from vmm.types import Accel

CALL_TIMES = 2.0  # of a tool without a machine, for run_code
GROWTH_MB = 32.0  # while a large file passes through
SHARE = 0.5  # of what the agent channel carries
FILE_MB, EMULATED_FILE_MB = 200, 20
FILE = "large.bin"
REMOVE = f"import os; os.remove({FILE!r})"  # two of them do not fit, and a file is replaced when the new one is there


async def measure(subject: Subject) -> Findings:
    """Measure calls and transfers on one server, then the many clients on another."""
    size = (EMULATED_FILE_MB if subject.facts.accel is Accel.TCG else FILE_MB) << 20
    alone = await _through_agent(subject, size)
    async with serving(subject.settings.changed({"pool.max": 0})) as port:
        calls = await anyio.to_thread.run_sync(_calls, subject, port)
        by_sdk = await _calls_by_sdk(subject, port)
        files = await anyio.to_thread.run_sync(_files, subject, port, size, alone)
    findings = Findings()
    for found in (calls, by_sdk, files, await crowd.measure(subject)):
        findings.add(found)
    return findings


def _calls(subject: Subject, port: int) -> Findings:
    """Time a tool without a machine, a run over MCP and the same over REST, in turn."""
    no_op: list[float] = []
    over_mcp: list[float] = []
    over_rest: list[float] = []
    link = Link(f"http://127.0.0.1:{port}/mcp", None)
    nothing = mcp_call(NO_OP, {})
    with RestClient(port) as rest:
        box = rest.create()
        run = mcp_call("run_code", {"sandbox_id": box.rpartition("/")[2], "code": FIRST_CODE})
        for number in range(subject.plan.calls):
            subject.progress(f"calls over HTTP: {number} of {subject.plan.calls}")
            no_op.append(took_ms(lambda: call_over_http(link, nothing)))
            over_mcp.append(took_ms(lambda: call_over_http(link, run)))
            over_rest.append(took_ms(lambda: rest.run(box, FIRST_CODE)))
        rest.ask("DELETE", box)
    figures = [
        figure("a tool that uses no machine, over HTTP", "ms", no_op),
        figure("run_code in a live sandbox, over HTTP", "ms", over_mcp),
        figure("the same run over REST", "ms", over_rest),
    ]
    tool, mcp, rest_run = figures
    promises = [
        Promise(
            "run_code over a no-op tool by a bare HTTP client, p50",
            mcp.p50 / tool.p50,
            CALL_TIMES,
            "times",
        ),
        Promise("a run over REST over the same over MCP, p50", rest_run.p50 / mcp.p50, 1, "times"),
    ]
    return Findings(figures, promises)


async def _calls_by_sdk(subject: Subject, port: int) -> Findings:
    """Time the same calls with the client of the MCP SDK, as users have it."""
    no_op: list[float] = []
    runs: list[float] = []
    async with Client(f"http://127.0.0.1:{port}/mcp") as client:
        created = await client.call_tool("create_sandbox", {})
        if created.is_error or created.structured_content is None:
            raise MeasurementFailed(f"A call by the MCP SDK failed: {created.content}")
        box = {"sandbox_id": created.structured_content["sandbox_id"]}
        for number in range(subject.plan.calls):
            subject.progress(f"calls over HTTP by the MCP SDK: {number} of {subject.plan.calls}")
            for tool, arguments, samples in ((NO_OP, {}, no_op), ("run_code", {**box, "code": FIRST_CODE}, runs)):
                began = anyio.current_time()
                result = await client.call_tool(tool, arguments)
                samples.append(1000 * (anyio.current_time() - began))
                if result.is_error:
                    raise MeasurementFailed(f"A call by the MCP SDK failed: {result.content}")
        await client.call_tool("close_sandbox", box)
    figures = [
        figure("a tool that uses no machine, by the MCP SDK's client", "ms", no_op),
        figure("run_code in a live sandbox, by the MCP SDK's client", "ms", runs),
    ]
    ratio = figures[1].p50 / figures[0].p50
    promise = Promise("run_code over a no-op tool by the MCP SDK's client, p50", ratio, CALL_TIMES, "times")
    return Findings(figures, [promise])


def _files(subject: Subject, port: int, size: int, alone: tuple[Figure, Figure]) -> Findings:
    """Send a large file and get it back. The first time fills buffers that stay, and is not counted."""
    up: list[float] = []
    down: list[float] = []
    most = 0.0
    with RestClient(port) as rest:
        box = rest.create()
        path = f"{box}/files/content?path={FILE}"
        rest.upload(path, parts(size))
        rest.download(path)
        rest.run(box, REMOVE)
        for number in range(subject.plan.transfers):
            subject.progress(f"{size >> 20} MB over REST: {number} of {subject.plan.transfers}")
            before = forget_peak_mb()
            up.append(size / 1e3 / took_ms(lambda: rest.upload(path, parts(size))))
            down.append(size / 1e3 / took_ms(lambda: rest.download(path)))
            most = max(most, memory_mb("VmHWM") - before)
            rest.run(box, REMOVE)
        rest.ask("DELETE", box)
    megabytes = size >> 20
    figures = [
        figure(f"upload of {megabytes} MB over REST", "MB/s", up),
        figure(f"download of {megabytes} MB over REST", "MB/s", down),
    ]
    promises = [
        Promise(f"{one.name} over the agent channel, p50", one.p50 / base.p50, SHARE, "times", at_least=True)
        for one, base in zip(figures, alone, strict=True)
    ]
    growth = Promise(f"memory of server and client while {megabytes} MB pass", most, GROWTH_MB, "MB more")
    return Findings([*alone, *figures], [*promises, growth])


async def _through_agent(subject: Subject, size: int) -> tuple[Figure, Figure]:
    """Send the same file through the agent client alone."""
    up, down = [], []
    async with subject.start("bench-http") as (_, agent):
        for number in range(subject.plan.transfers):
            subject.progress(f"{size >> 20} MB through the agent client: {number} of {subject.plan.transfers}")
            began = anyio.current_time()
            async with agent.upload(FILE) as upload:
                for part in parts(size - CHUNK_BYTES):
                    await upload.add(part)
                await upload.finish(bytes(CHUNK_BYTES))
            sent = anyio.current_time()
            for offset in range(0, size, CHUNK_BYTES):
                await agent.read(FILE, offset=offset, limit=CHUNK_BYTES)
            up.append(size / 1e6 / (sent - began))
            down.append(size / 1e6 / (anyio.current_time() - sent))
            await run_code(agent, REMOVE)
    return (
        figure(f"upload of {size >> 20} MB through the agent client", "MB/s", up),
        figure(f"download of {size >> 20} MB through the agent client", "MB/s", down),
    )


def parts(size: int) -> Iterator[bytes]:
    """Yield a file of zeros in chunks."""
    chunk = bytes(CHUNK_BYTES)
    for _ in range(size // CHUNK_BYTES):
        yield chunk


def forget_peak_mb() -> float:
    """Let the kernel measure this process's peak memory anew, and return what it uses now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def memory_mb(field: str) -> float:
    """Return what the kernel says about the memory of this process: VmRSS is now, VmHWM the most."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024
