"""The watch over the memory of machines on hosts without cgroups. A process with such a file plays gVisor's sentry."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from tests.waiting import HANG_S
from vmm import memory_watch
from vmm.drivers.gvisor.memory import Sentry, find_sentry

MB = 1 << 20
SENTRY = """
import os, sys
file = os.memfd_create("runsc-memory") if sys.argv[1:] else None
if file is not None:
    os.write(file, bytes(8 << 20))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def sentry(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its stdin ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SENTRY, *options], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


async def test_a_machine_that_takes_too_much_is_killed():
    reasons: list[str] = []
    with sentry("with memory") as process, anyio.fail_after(HANG_S):
        await memory_watch.watch(process.pid, find_sentry, MB, lambda: reasons.append("memory"))
        assert process.wait(HANG_S) == -signal.SIGKILL
    assert reasons == ["memory"]


async def test_the_watch_ends_with_the_machine():
    """Its number may then be that of another process."""
    with sentry("with memory") as process, anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(memory_watch.watch, process.pid, find_sentry, 1 << 40, lambda: None)
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(process.communicate)


async def test_a_machine_without_a_sentry_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(memory_watch, "LATE_S", -1.0)
    with sentry() as process, anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(memory_watch.watch, process.pid, find_sentry, MB, lambda: None)
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(process.communicate)
    assert f"no machine below process {process.pid}" in caplog.text


async def test_a_watch_that_fails_is_logged(monkeypatch, caplog):
    def broken(_sentry: Sentry, _enough: int) -> int:
        raise ValueError("odd")

    monkeypatch.setattr(Sentry, "used_bytes", broken)
    with sentry("with memory") as process, anyio.fail_after(HANG_S):
        await memory_watch.watch(process.pid, find_sentry, MB, lambda: pytest.fail("killed"))
    assert "not watched any more" in caplog.text
