"""The one place where the parts are put together."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady, SandboxError
from mcp_sandbox.local import LocalProvider
from mcp_sandbox.operation import open_operation
from mcp_sandbox.service import SandboxService
from templates.build import Builder, Progress
from templates.kernel import OwnKernel
from templates.store import Store
from vmm.driver import DRIVER_NAMES, DriverConfig, SnapshotDriver, load_driver
from vmm.types import Accel


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine has: the store of built things, their builder, and the driver that runs them."""

    settings: Settings
    store: Store
    builder: Builder
    driver: SnapshotDriver


def _ignore(_progress: Progress) -> None:
    """For those who do not watch a build."""


def make_host(settings: Settings, report: Callable[[Progress], None] = _ignore) -> Host:
    """The parts as the settings want them. Nothing is started or probed yet.

    Raises:
        HostNotReady: the driver cannot restore snapshots.
        DriverUnavailable: there is no such driver.
    """
    store = Store(settings.home)
    own = OwnKernel(settings.guest_kernel, settings.guest_modules) if settings.guest_kernel else None
    builder = Builder(store, report, own_kernel=own)
    config = DriverConfig(
        run_dir=settings.run_dir,
        cache_dir=settings.cache_dir,
        kernel=builder.find_kernel(),
        accel=None if settings.accel == "auto" else Accel(settings.accel),
    )
    driver = load_driver(DRIVER_NAMES[0] if settings.driver == "auto" else settings.driver, config)
    if not isinstance(driver, SnapshotDriver):
        raise HostNotReady(f"driver {driver.name!r} cannot restore snapshots", "choose another driver")
    return Host(settings, store, builder, driver)


@asynccontextmanager
async def open_service(host: Host) -> AsyncIterator[SandboxService]:
    """A service over `host`, ready at once: the host is probed in the background. It owns the driver."""
    local = LocalProvider(host.driver, host.builder, max_restores=host.settings.max_restores)
    try:
        async with open_operation(host.settings, host.store) as operation, anyio.create_task_group() as tasks:
            tasks.start_soon(_probe, local)
            provider = operation.acquiring(operation.restoring(local))
            async with SandboxService(provider, host.settings) as service, operation.controlled(service):
                yield service
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await host.driver.aclose()


async def _probe(provider: LocalProvider) -> None:
    with suppress(SandboxError):  # whoever asks for a sandbox is told
        await provider.facts()
