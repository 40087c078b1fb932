"""The one place where the parts are put together."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from mcp_sandbox.config import AUTO, Settings
from mcp_sandbox.machines.choice import Choice, choose
from mcp_sandbox.machines.nat import nat_config
from mcp_sandbox.machines.provider import HostFacts
from templates.build import Builder, Progress
from templates.kernel import OwnKernel
from templates.locks import hold
from templates.revisions import Revisions
from templates.store import Store
from vmm.driver import Driver, DriverConfig, driver_info, load_driver
from vmm.types import Accel, DriverInfo, Isolation, Probe

if TYPE_CHECKING:
    from mcp_sandbox.machines.provider import Provider
    from mcp_sandbox.operating.control import Panel
    from mcp_sandbox.sandboxes.admission import Quota
    from mcp_sandbox.sandboxes.service import SandboxService


@dataclass(frozen=True, slots=True)
class Host:
    """This host: its store, the builder that fills it, and the driver that runs machines."""

    settings: Settings
    store: Store
    builder: Builder
    driver: Driver
    choice: Choice

    @property
    def facts(self) -> HostFacts | None:
        """Return what isolates sandboxes on this host; None if it cannot run any."""
        verdict = self.choice.verdict
        if not verdict.usable:
            return None
        return HostFacts(
            self.driver.name, self.driver.capabilities.isolation, verdict.accel, verdict.missing_protections
        )


def _ignore(_progress: Progress) -> None:
    """Ignore the progress of a build."""


def make_builder(
    settings: Settings, report: Callable[[Progress], None] = _ignore, pending: Mapping[str, str] | None = None
) -> tuple[Store, Builder]:
    """Return the store and its builder. `pending` are revisions that are not current yet (see `template update`)."""
    store = Store(settings.home)
    own = OwnKernel(settings.guest_kernel, settings.guest_modules) if settings.guest_kernel else None
    revisions = Revisions(store.home, pending)
    return store, Builder(store, report, own_kernel=own, catalogue=settings.catalogue, revisions=revisions)


class Drivers:
    """The drivers of this host, each loaded when it is first used and closed with the context."""

    def __init__(
        self,
        settings: Settings,
        report: Callable[[Progress], None] = _ignore,
        pending: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.store, self.builder = make_builder(settings, report, pending)
        self._loaded: dict[str, Driver] = {}
        self._held = ExitStack()  # locks on store entries that the drivers use

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for name in list(self._loaded):
                await self._loaded.pop(name).aclose()
            self._held.close()

    def load(self, name: str) -> Driver:
        """Return a driver, configured with what the builder has fetched so far.

        Raises:
            DriverUnavailable: there is no such driver.
            TemplateError: the guest kernel of the settings cannot be used.
        """
        if name not in self._loaded:
            info = driver_info(name)
            program = self.builder.find_program(info.program) if info.program else None
            if program is not None:
                self._held.enter_context(hold([program.parent]))
            chosen = info.program is not None and self.builder.chosen.sha512_of(info.program) is not None
            self._loaded[name] = load_driver(name, self._config(info, program, chosen=chosen))
        return self._loaded[name]

    def _config(self, info: DriverInfo, program: Path | None, *, chosen: bool) -> DriverConfig:
        return DriverConfig(
            run_dir=self.settings.run_dir,
            cache_dir=self.settings.cache_dir,
            kernel=self.builder.find_kernel() if info.capabilities.boots_kernel else None,
            own_kernel=self.settings.guest_kernel is not None,
            accel=None if self.settings.accel == AUTO else Accel(self.settings.accel),
            program=program,
            chosen=chosen,
            binary=self.settings.binaries.get(info.name),
            nat=nat_config(self.settings),
        )

    async def try_program(self, name: str, program: Path) -> Probe:
        """Probe a driver with a program of the store that is not in use yet."""
        driver = load_driver(name, self._config(driver_info(name), program, chosen=True))
        try:
            return await driver.probe()
        finally:
            await driver.aclose()

    async def probe(self, name: str) -> Probe:
        """Probe a driver with what is on this host now."""
        return await self.load(name).probe()

    async def fetch_and_probe(self, name: str) -> Probe:
        """Probe a driver after fetching what it lacks, which needs no root; raise BuildFailed."""
        verdict = await self.probe(name)
        if verdict.lacks is None:
            return verdict
        await self.builder.fetch(verdict.lacks)
        await self.unload(name)  # its configuration is from before
        return await self.probe(name)

    async def unload(self, name: str) -> None:
        """Forget a driver and its verdict, because what it needs has changed."""
        await self._loaded.pop(name).aclose()


@asynccontextmanager
async def open_host(
    settings: Settings, report: Callable[[Progress], None] = _ignore, *, fetch: bool = False
) -> AsyncIterator[Host]:
    """Open this host with the driver that the settings name, or the best one that works. It may be unusable.

    With `fetch`, what a driver lacks is fetched before it is probed.

    Raises:
        TooWeak, DriverUnavailable, TemplateError: the settings allow no driver.
    """
    async with Drivers(settings, report) as drivers:
        choice = await choose(settings, drivers.fetch_and_probe if fetch else drivers.probe)
        driver = drivers.load(choice.driver)
        if driver.capabilities.isolation is Isolation.NAMESPACE:
            weaknesses = "; ".join(choice.verdict.missing_protections)
            sys.stderr.write(
                f"mcp-sandbox: driver {driver.name} is the weakest isolation. Use a stronger one for untrusted code. "
                f"Missing protections: {weaknesses}.\n"
            )
        yield Host(settings, drivers.store, drivers.builder, driver, choice)


@asynccontextmanager
async def open_service(host: Host, *, pooled: bool) -> AsyncIterator["SandboxService"]:
    """Open a service on `host`: `open_operated` for callers that need no panel."""
    async with open_operated(host, pooled=pooled) as (service, _panel):
        yield service


@asynccontextmanager
async def open_operated(
    host: Host,
    *,
    pooled: bool,
    url: str | None = None,
    current_quota: "Callable[[], Quota] | None" = None,
) -> AsyncIterator[tuple["SandboxService", "Panel"]]:
    """Open a service on `host`, with or without a pool of started machines, and its operators' panel.

    `url` is where the service is served over HTTP: other commands ask for it.
    On a host that cannot run machines every call for a sandbox fails with the reason.
    """
    # Imported late: a server greets its client before, and some commands need only the host.
    from mcp_sandbox.machines.builds import Builds
    from mcp_sandbox.machines.local import LocalProvider
    from mcp_sandbox.machines.pool import Pool, pool_limits
    from mcp_sandbox.machines.web import WebMachines
    from mcp_sandbox.operating.operation import open_operation
    from mcp_sandbox.sandboxes.admission import NO_QUOTA
    from mcp_sandbox.sandboxes.service import SandboxService
    from mcp_sandbox.web.opening import open_web
    from websearch.surroundings import surroundings

    settings = host.settings
    builds = Builds(host.driver, host.builder, settings.catalogue)
    local = LocalProvider(host.driver, builds, max_restores=settings.limits.restores, run_dir=settings.run_dir)
    async with AsyncExitStack() as stack:
        operation = await stack.enter_async_context(open_operation(host.settings, host.store))
        provider: Provider = operation.restoring(local)
        pool: Pool | None = None
        if pooled and host.facts is not None:
            limits = pool_limits(settings.pool, max_restores=settings.limits.restores)
            pool = Pool(provider, builds, limits, first=settings.template, on_request=operation.metrics.pool_asked)
            provider = pool
        provider = await stack.enter_async_context(operation.acquiring(provider))
        web = None
        if settings.web_tools:
            opening = open_web(settings.web, WebMachines(provider), surroundings, operation.network_accessed)
            web = await stack.enter_async_context(opening)
        quota = current_quota or (lambda: NO_QUOTA)
        service = SandboxService(provider, host.settings, operation, web=web, current_quota=quota)
        await stack.enter_async_context(service)
        panel = operation.panel(service, pool.described if pool else tuple, url)
        await stack.enter_async_context(operation.controlled(panel))
        if pool is not None:
            stack.callback(pool.retire)
        yield service, panel
