"""`mcp-sandbox run -i`: what is typed goes to the code, and its output is shown as it comes."""

import os
import sys
from contextlib import suppress

import anyio

from mcp_sandbox.commands.run_output import write_output
from mcp_sandbox.errors import StdinClosed, StdinFull
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress, RunView

STDIN = 0
READ_BYTES = 16 << 10
LOOK_S = 30.0  # how long one look for more output waits


async def run_interactively(service: SandboxService, request: CodeRun) -> RunView:
    """Run code that was asked for with an open standard input, and return its result.

    Raises:
        SandboxError: there is none.
    """
    run = await service.run_for_client(request)
    assert isinstance(run, RunProgress), "a run with an open standard input goes on in the background"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_forward, service, request.owner, run)
        result = await _show(service, request.owner, run)
        tasks.cancel_scope.cancel()
    return result


async def _show(service: SandboxService, owner: str, run: RunProgress) -> RunView:
    offset = 0
    while True:
        seen = await service.read_output(
            owner, run.sandbox_id, run.run_id, offset=offset, wait_s=LOOK_S, full_page=False
        )
        write_output(sys.stdout, seen.page.text)
        sys.stdout.flush()
        offset = seen.page.end
        if offset < seen.page.size:
            continue
        if seen.error is not None:  # the machine is lost
            await service.stop_run(owner, run.sandbox_id, run.run_id)  # raises what happened to it
        if seen.result is not None:
            return seen.result


async def _forward(service: SandboxService, owner: str, run: RunProgress) -> None:
    """Send everything until the end of our own standard input, as fast as the code reads it."""
    with suppress(StdinClosed):  # the code has ended
        while data := await _typed():
            while data:
                try:
                    await service.write_stdin(owner, run.sandbox_id, run.run_id, data)
                    break
                except StdinFull as full:
                    data = data[full.taken :]
        await service.write_stdin(owner, run.sandbox_id, run.run_id, b"", close=True)


async def _typed() -> bytes:
    with suppress(PermissionError):  # a file, which is always readable
        await anyio.wait_readable(STDIN)
    return os.read(STDIN, READ_BYTES)
