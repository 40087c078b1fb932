"""Everything an operator needs around the service: registry, recovery, metrics and the control socket."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxNotFound
from mcp_sandbox.machines.provider import LeasedMachine, Provider
from mcp_sandbox.operating.control import Panel, serve_control
from mcp_sandbox.operating.database import MachineState
from mcp_sandbox.operating.metrics import Measured, Metrics
from mcp_sandbox.operating.recovery import recover
from mcp_sandbox.operating.registry import Registered, Registry, open_registry
from mcp_sandbox.sandboxes.sandbox import Observer, Sandbox
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import ServedSandbox
from templates.store import Store
from vmm.hierarchy import detect
from websearch.access import Access

Pools = Callable[[], Iterable[Mapping[str, object]]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operation(Observer):
    """The registry and the metrics of one server, kept up to date by the service and its providers."""

    settings: Settings
    registry: Registry
    metrics: Metrics

    def restoring(self, source: Provider) -> Provider:
        """Wrap the provider that starts machines: record and time each of them. A pool goes around this."""
        return Registered(Measured(source, self.metrics, "restore"), self.registry)

    def acquiring(self, source: Provider) -> Provider:
        """Wrap the provider that the service uses, pooled or not: count its failures."""
        return Measured(source, self.metrics, "acquire")

    def machine_ready(self, box: Sandbox, machine: LeasedMachine, waited_s: float) -> None:
        """Record which sandbox has the machine and how long it waited for it."""
        self.metrics.took("acquire", box.template, waited_s)
        self.registry.claimed(machine.id, box.id, box.owner)

    def run_ended(self, box: Sandbox, outcome: str) -> None:
        """Count a run."""
        self.metrics.run_ended(box.template, outcome)

    def limit_refused(self, setting: str) -> None:
        """Count a refusal."""
        self.metrics.refused(setting)

    def panel(self, service: SandboxService, pools: Pools = tuple, url: str | None = None) -> Panel:
        """Return what operators see of a service, which is served over HTTP at `url`, if anywhere."""
        return ServicePanel(service, self.registry, self.metrics, pools, url)

    def network_accessed(self, access: Access) -> None:
        """Log and count a request of a sandbox to the network."""
        access.write_log()
        self.metrics.network_accessed(access)

    def controlled(self, panel: Panel) -> AbstractAsyncContextManager[None]:
        """Serve the control socket as long as the block lasts."""
        return serve_control(self.settings.run_dir, self.registry.server.process, panel)


@asynccontextmanager
async def open_operation(settings: Settings, store: Store) -> AsyncIterator[Operation]:
    """Add this server to the registry, and clean up after killed servers in the background."""
    hierarchy = await anyio.to_thread.run_sync(detect)
    async with open_registry(settings.home, hierarchy.folders) as registry, anyio.create_task_group() as tasks:
        tasks.start_soon(_recover, registry, settings, store)
        yield Operation(settings, registry, Metrics(registry.own))
        tasks.cancel_scope.cancel()


async def _recover(registry: Registry, settings: Settings, store: Store) -> None:
    try:
        await recover(registry, settings.run_dir, store)
    except Exception as error:  # it must not end this server
        logger.warning("cleaning up after killed servers failed; the next server tries again", exc_info=error)


@dataclass(frozen=True, slots=True)
class ServicePanel:
    """What operators see of a service: the sandboxes of all owners."""

    service: SandboxService
    registry: Registry
    numbers: Metrics
    pools: Pools
    url: str | None = None

    def sandboxes(self) -> list[Mapping[str, object]]:
        """Return what `mcp-sandbox sandbox list` shows."""
        pid = self.registry.server.process.pid
        return [_view_of(box, pid).model_dump(mode="json") for box in self.service.alive()]

    async def close(self, sandbox_id: str) -> bool:
        """Close a sandbox of any owner; False if it was already ending. Raises SandboxNotFound."""
        box = next((box for box in self.service.alive() if box.id == sandbox_id), None)
        if box is None:
            raise SandboxNotFound(sandbox_id)
        return await box.close("an operator closed it")

    def stats(self) -> Mapping[str, object]:
        """Return what `doctor` shows about a running server, and where commands reach it."""
        own = self.registry.own()
        return {
            "pid": self.registry.server.process.pid,
            "uptime_s": time.time() - self.registry.server.created,
            "sandboxes": len(self.service.alive()),
            "machines": {str(state): sum(machine.state is state for machine in own) for state in MachineState},
            "pools": list(self.pools()),
            "url": self.url,
        }

    async def metrics(self) -> str:
        """Measure all machines and return the metrics as text."""
        await self.numbers.measure()
        self.numbers.seen([box.state for box in self.service.alive()], self.service.admission.waiting)
        return self.numbers.text()


def _view_of(box: Sandbox, server_pid: int) -> ServedSandbox:
    return ServedSandbox(
        sandbox_id=box.id,
        owner=box.owner,
        template=box.template,
        network=box.network.grant.mode,
        state=box.state,
        age_s=round(anyio.current_time() - box.created, 1),
        expires_in_s=round(box.expires_in_s(), 1),
        machine_id=box.lease.machine.id if box.lease else None,
        server_pid=server_pid,
    )
