"""The real server on stdio with files as machines: `python -m tests.functional.stdio_fake DIRECTORY`."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import anyio

from guest.client.messages import Output
from mcp_sandbox.config import Settings
from mcp_sandbox.machines.provider import Lease, MachineRequest
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import create_server
from mcp_sandbox.serving.stdio_server import max_message_bytes, serve_stdio
from tests.unit.fakes import FACTS, FakeProvider, finished

TRAINING = "train"


def plan_training(provider: FakeProvider) -> None:
    """Let `TRAINING` print a line and run until it is stopped."""
    provider.plans[TRAINING] = [Output("stdout", "epoch 1\n"), anyio.Event(), finished()]


class FileProvider(FakeProvider):
    """Each machine is a file while it lives."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        plan_training(self)

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with super().acquire(request) as lease:
            path = self._directory / f"machine-{len(self.agents)}"
            path.touch()
            try:
                yield lease
            finally:
                path.unlink()


def main() -> None:
    directory = Path(sys.argv[1])
    settings = Settings(log={"level": "INFO"})
    server = create_server(settings, str(FACTS), lambda: SandboxService(FileProvider(directory), settings))
    (directory / "server.pid").write_text(str(os.getpid()))
    anyio.run(
        partial(
            serve_stdio,
            lambda: nullcontext(server),
            parent=os.getppid(),
            max_message_bytes=max_message_bytes(settings),
        )
    )


if __name__ == "__main__":
    main()
