"""A process outside any sandbox that runs the template's own programs, to compare machines with."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.commands.bench.subject import Subject
from vmm.driver import DriverConfig, load_driver
from vmm.limits import control_group, detect
from vmm.process import Confinement, spawn
from vmm.types import Limits

MAX_LINE_BYTES = 4000

Ask = Callable[[bytes], Awaitable[float]]  # sends a line and returns the seconds that the process measured


async def template_files(subject: Subject) -> Path:
    """Return the directory with the template's files. It is bubblewrap's build, made now if it is missing."""
    settings = subject.settings
    bubblewrap = load_driver("bubblewrap", DriverConfig(settings.run_dir, settings.cache_dir))
    subject.progress("unpacking the template's files")
    return (await subject.builder.build(subject.built.template, bubblewrap)).root


@asynccontextmanager
async def native_process(argv: Sequence[str]) -> AsyncIterator[Ask]:
    """Run `argv` on the host as a worker that answers each line with a number of seconds.

    Like a machine it has a cgroup, but without limits: a busy host gives each cgroup an equal share of the CPU.
    """
    async with (
        control_group(detect(), "bench-native", Limits()) as group,
        spawn(group.wrap(argv), confinement=Confinement(offline=False), before_start=group.add, stdio=True) as process,
    ):
        answers = BufferedByteReceiveStream(process.stream)

        async def ask(line: bytes) -> float:
            await process.stream.send(line + b"\n")
            return float(await answers.receive_until(b"\n", MAX_LINE_BYTES))

        yield ask
