"""A machine of a monitor with an API, whose agent listens on vsock."""

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import anyio
from anyio.abc import ByteStream

from vmm import vsock
from vmm.errors import MachineLost
from vmm.limits import ControlGroup
from vmm.machine import ProcessMachine
from vmm.microvm.api import Api
from vmm.microvm.layout import AGENT_SOCKET, KERNEL
from vmm.process import RunningProcess
from vmm.types import MachineSpec

BOOT_S = 300.0  # a hang: a machine boots in a second, in minutes on an emulated host
RESTORED_S = 40.0  # an agent that runs listens at once, but the host may be busy
RECONNECT_S = 10.0
ANSWER_S = 1.0  # to a connection, which takes a millisecond
LOOK_AGAIN_S = 0.02  # a guest that boots does not say when its agent listens; a restored one listens already


class MicroVm(ProcessMachine):
    """A running monitor."""

    def __init__(
        self,
        spec: MachineSpec,
        process: RunningProcess,
        group: ControlGroup,
        control: Api,
        root: int,
        files: Mapping[str, int],
    ) -> None:
        super().__init__(spec, process, group)
        self.control = control
        self.root = root  # the root directory of its namespaces, with its sockets
        self.files = files  # the open files that it has links to, by their names in that directory
        self._within_s = BOOT_S  # an agent listens
        self._agent: vsock.Reconnecting | None = None

    def restored(self) -> None:
        """Expect the agent to listen already."""
        self._within_s = RESTORED_S

    async def connect(self) -> ByteStream:
        if self._agent is not None:
            raise MachineLost(f"the agent's stream of machine {self.id} was already taken")
        self._agent = vsock.Reconnecting(await self._dial(self._within_s), partial(self._dial, RECONNECT_S))
        return self._agent

    @asynccontextmanager
    async def disconnected(self) -> AsyncIterator[None]:
        """Take a snapshot in the block, which may close the agent's connection; then connect again if it was there."""
        if self._agent is None:
            yield
            return
        async with self._agent.interrupted():
            yield

    @contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """Open a directory of the machine's root. The monitor owns it, so no link is followed."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(name.lstrip("/"), flags, dir_fd=self.root)
        try:
            yield folder
        finally:
            os.close(folder)

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove files of a directory of the machine's root, as far as they are there."""
        with suppress(OSError), self.folder(folder) as place:
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=place)

    def boot_once(self) -> None:
        """Take its kernel away, so that a reboot ends the machine, whatever its monitor makes of it."""
        folder, kernel = os.path.split(KERNEL)
        self.remove(folder, [kernel])

    async def _dial(self, within_s: float) -> ByteStream:
        """Connect to the agent as soon as it listens; raise MachineLost if the machine ends before.

        A monitor numbers its connections from the same start after every restore. Before version 52 of Cloud
        Hypervisor, a restored guest still has those of the saved machine, and does not answer one with such a number.
        """
        patience_s = ANSWER_S
        with anyio.move_on_after(within_s):
            while True:
                try:
                    with anyio.fail_after(patience_s):
                        return await vsock.connect(self.root, AGENT_SOCKET)
                except TimeoutError:
                    patience_s *= 2  # the machine may only be slow
                except ConnectionRefusedError:
                    with anyio.move_on_after(LOOK_AGAIN_S):
                        raise MachineLost(f"machine {self.id} ended with {await self.wait()}") from None
        raise MachineLost(f"no agent listens in machine {self.id} after {within_s:.0f} s")
