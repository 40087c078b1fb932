"""What machines of all drivers have in common: they are processes of this host, with limits."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from vmm import standstill
from vmm.errors import MachineLost
from vmm.limits import ControlGroup
from vmm.memory_watch import Find, limited
from vmm.process import RunningProcess
from vmm.process_table import of_pid
from vmm.types import CpuPriority, Exit, MachineSpec, NetworkDevice, Usage
from vmm.usage import usage


class ProcessMachine:
    """A machine that is a process and all below it."""

    def __init__(self, spec: MachineSpec, process: RunningProcess, group: ControlGroup) -> None:
        self.spec = spec
        self.process = process
        self.group = group
        self.device: NetworkDevice | None = None
        self._over_memory = False  # the server has killed it for that
        self._stopped: list[int] = []  # the processes that `pause` stopped one by one
        self._saving = anyio.Lock()  # while a snapshot is taken
        self._ends = False

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def pid(self) -> int:
        return self.process.pid

    async def pause(self) -> None:
        if of_pid(self.pid) is None:
            raise MachineLost(f"machine {self.id} has ended")
        if not await self.group.freeze():
            self._stopped += await standstill.stop(self.pid)

    async def resume(self) -> None:
        await self.group.thaw()
        stopped, self._stopped = self._stopped, []
        standstill.resume(stopped)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Take a snapshot in the block: the machine's files stay open until it ends. Raises MachineLost."""
        async with self._saving:
            if self._ends:
                raise MachineLost(f"machine {self.id} has ended")
            yield

    async def let_end(self) -> None:
        """Let the machine's processes end fast, before they are killed and the machine's files are closed.

        One that stands still does not reap the machine's first, and one that gets little CPU takes long to exit. A
        snapshot that is being taken ends first: later, the numbers of its files may be those of another machine's.
        """
        self._ends = True
        self.prioritize(CpuPriority.INTERACTIVE)
        with anyio.CancelScope(shield=True):
            await self.resume()
            if self._saving.locked():
                await self.process.kill()
            async with self._saving:
                pass

    def prioritize(self, priority: CpuPriority) -> None:
        self.group.prioritize(priority)

    async def usage(self) -> Usage:
        return await anyio.to_thread.run_sync(self._measure)  # it reads a file of each process

    def _measure(self) -> Usage:
        return usage(self.pid)

    def watched(self, find: Find) -> AbstractContextManager[None]:
        """Kill the machine that `find` finds if it takes too much memory, for hosts without cgroups."""

        def exceeded() -> None:
            self._over_memory = True

        return limited(self.pid, find, self.spec.host_bytes, exceeded)

    async def wait(self) -> Exit:
        end = await self.process.wait()
        if self._over_memory or self.group.out_of_memory():
            return replace(end, detail=f"it exceeded the host's memory limit {end.detail}".strip())
        return end


class StdioMachine(ProcessMachine):
    """A machine whose agent uses the process's standard input and output."""

    def __init__(self, spec: MachineSpec, process: RunningProcess, group: ControlGroup) -> None:
        super().__init__(spec, process, group)
        self._stream: ByteStream | None = process.stream

    async def connect(self) -> ByteStream:
        if self._stream is None:
            raise MachineLost(f"the agent's stream of machine {self.id} was already taken")
        stream, self._stream = self._stream, None
        return stream
