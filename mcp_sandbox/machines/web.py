"""The machine that reaches the web: leased like any other, with workers that the template has started."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from guest.client.streams import ServeStream
from mcp_sandbox.machines.provider import Lease, MachineRequest, Provider
from vmm.types import CpuPriority, NetworkMode

TEMPLATE = "websearch-tools"


class WebLease:
    """Such a machine, as long as its lease lasts."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    async def ping(self) -> None:
        """Return if the machine's agent answers."""
        await self._lease.agent.ping()

    async def memory_bytes(self) -> int:
        """Return the memory that the machine takes from this host."""
        return (await self._lease.machine.usage()).memory_bytes


class WebMachines:
    """Starts machines of the template websearch-tools: a MachineSource."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @asynccontextmanager
    async def machine(self, serve_stream: ServeStream) -> AsyncIterator[WebLease]:
        """Start a machine whose streams go to `serve_stream`.

        Raises:
            TemplateNotBuilt, HostNotReady, SandboxError: there is none.
        """
        request = MachineRequest(TEMPLATE, network=NetworkMode.PROXY, serve_stream=serve_stream)
        async with self._provider.acquire(request) as lease:
            lease.machine.prioritize(CpuPriority.INTERACTIVE)  # whatever it does, a caller waits for it
            yield WebLease(lease)
