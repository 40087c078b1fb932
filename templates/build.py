"""From a template to something machines can be started from, step by step.

    base ──────────────────┐
    layers, interpreter ───┴──> image ──> tree ──┐
                                                 ├──> snapshot
    kernel ──> initramfs ────────────────────────┤
    agent ───────────────────────────────────────┘

Which of these a machine needs, the capabilities of its driver say. Every step looks into the store first, so that
what did not change is not made again.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel

from guest.client.messages import WarmUp
from templates import debian, dockerfile, guest_code, image, interpreter, kernel, oci, runsc, snapshot, tree
from templates.catalogue import Catalogue
from templates.current import (
    SHARED_KINDS,
    STARTING_KINDS,
    Boot,
    Current,
    ImagePlan,
    Root,
    boot_agent,
    boot_kernel,
    guest_kernel,
    plan_image,
    root_of,
)
from templates.holding import held
from templates.image_config import check_service, explain
from templates.kernel import OwnKernel
from templates.model import Template
from templates.steps import MakeTools, Progress, Steps, innermost
from templates.store import Entry, Store, key_of
from templates.tools import LoggedTools
from templates.warmup import warm_up
from vmm.driver import Driver, SnapshotDriver
from vmm.types import Capabilities, Download, GuestCode, GuestKernel, MachineSpec, Snapshot

__all__ = ["Builder", "BuiltTemplate", "Progress"]

_First = TypeVar("_First")
_Second = TypeVar("_Second")


@dataclass(frozen=True, slots=True)
class BuiltTemplate:
    """All that is needed to start machines of a template."""

    template: Template
    root: Path
    boot: GuestKernel | GuestCode
    warm_up: WarmUp
    snapshot: Snapshot | None  # None: the driver has none, and each machine is warmed up when it starts
    version: str = ""  # machines of another version are made from something else

    def spec(self, machine_id: str) -> MachineSpec:
        """What a driver needs to start one machine of this template."""
        size = self.template.machine
        return MachineSpec(machine_id, self.root, self.boot, size.memory_mb, size.vcpus, size.disk_mb)

    def entries(self) -> tuple[Path, ...]:
        """What of the store its machines stand on: hold it while there are any."""
        boot = self.boot
        files = [boot.archive] if isinstance(boot, GuestCode) else [boot.vmlinuz, boot.initramfs]
        entries = [file.parent for file in (self.root, *files)]
        return (*entries, self.snapshot.path) if self.snapshot else tuple(entries)

    def is_there(self) -> bool:
        """Whether nobody has removed it from the store."""
        return self.root.exists() and (self.snapshot is None or self.snapshot.path.exists())


class Builder:
    """Builds templates into a store, and finds in it what was built before."""

    def __init__(
        self,
        store: Store,
        report: Callable[[Progress], None] = lambda _progress: None,
        *,
        own_kernel: OwnKernel | None = None,
        make_tools: MakeTools = LoggedTools,
        catalogue: Catalogue | None = None,
    ) -> None:
        self._store = store
        self._catalogue = catalogue or Catalogue()
        self._own_kernel = own_kernel
        self._steps = Steps(store, report, make_tools)
        self._current = Current(store, own_kernel)

    async def fetch(self, what: Download) -> None:
        """Fetch what a driver lacks; load the driver again afterwards."""
        await {Download.KERNEL: self.build_kernel, Download.RUNSC: self.build_runsc}[what]()

    async def build(self, template: Template, driver: Driver) -> BuiltTemplate:
        """Make what is missing of a template; raises BuildFailed, after which nothing half-made is left.

        InvalidTemplate: its image has nothing that the template wants to be started.
        """
        self._store.sweep()
        root, boot = await _both(
            partial(self._root, template, driver.capabilities),
            partial(self._boot, driver.capabilities),
        )
        check_service(template, root.config)
        cold = _cold(template, root, boot)
        if not driver.capabilities.snapshot:
            return cold
        assert isinstance(driver, SnapshotDriver)
        spec = cold.spec(f"build-{secrets.token_hex(4)}")
        with held(cold.entries()):
            entry = await self._steps.take(
                "snapshot",
                "snapshot",
                snapshot.snapshot_inputs(template, cold.warm_up, root.id, boot.id, await driver.fingerprint()),
                partial(snapshot.make_snapshot, template=template, warm_up=cold.warm_up, driver=driver, spec=spec),
            )
        return replace(cold, snapshot=Snapshot(driver.name, entry.path))

    async def build_image(self, template: Template) -> Path:
        """Make the root image of a template, for those who need no snapshot."""
        return (await self._image(template)).path / image.IMAGE

    async def build_kernel(self) -> GuestKernel:
        """Make kernel and initramfs, which all templates share."""
        return guest_kernel(*await self._kernel())

    async def build_runsc(self) -> Path:
        """Fetch a gVisor of our own."""
        return (await self._steps.take("runsc", "runsc", runsc.runsc_inputs(), runsc.make_runsc)).path / runsc.RUNSC

    async def find(self, template: Template, driver: Driver) -> BuiltTemplate | None:
        """What `build` would return without making anything, or None."""
        root, boot = self._current.root(template, driver.capabilities), self._current.boot(driver.capabilities)
        if root is None or boot is None:
            return None
        cold = _cold(template, root, boot)
        if not driver.capabilities.snapshot:
            return cold
        assert isinstance(driver, SnapshotDriver)
        inputs = snapshot.snapshot_inputs(template, cold.warm_up, root.id, boot.id, await driver.fingerprint())
        path = self._store.get("snapshot", inputs)
        return replace(cold, snapshot=Snapshot(driver.name, path)) if path else None

    def find_kernel(self) -> GuestKernel | None:
        """Kernel and initramfs, if they were made for the code as it is now."""
        found = self._current.kernel()
        return guest_kernel(*found) if found else None

    def find_runsc(self) -> Path | None:
        """The gVisor of our own, if it was fetched."""
        found = self._current.runsc()
        return found.path / runsc.RUNSC if found else None

    def stamp(self) -> tuple[int, ...]:
        """What changes whenever something is built, or removed, that machines are started from."""
        return self._store.stamp(STARTING_KINDS)

    def entries_of(self, template: Template) -> list[Entry]:
        """What the store holds for one template: its images, trees and all snapshots ever taken of it.

        Templates that are made from the same things have them together.
        """
        entries = self._store.entries()
        current = {entry.path for entry in self._current.made_for(template, entries, self._current.shared())}
        return [
            entry
            for entry in entries
            if entry.kind not in SHARED_KINDS
            and (entry.path in current or entry.details.get("template") == template.name)
        ]

    def entries_of_it_alone(self, template: Template) -> list[Entry]:
        """The same without what other templates are made from or started from, too."""
        entries, shared = self._store.entries(), self._current.shared()
        others = [known for known in self._catalogue.templates().values() if known.name != template.name]
        theirs = {entry.path for other in others for entry in self._current.made_for(other, entries, shared)}
        return [entry for entry in self.entries_of(template) if entry.path not in theirs]

    async def unused(self, drivers: Iterable[Driver], *templates: Template) -> list[Entry]:
        """What can be removed: no template of the catalogue, nor of `templates`, is made from it or started from it.

        `drivers` are those that work here; what was built for the others stays as long as it is of something current.
        A template that cannot be read keeps what was built of it.
        """
        fingerprints = {
            driver.name: await driver.fingerprint()
            for driver in drivers
            if driver.capabilities.snapshot and isinstance(driver, SnapshotDriver)
        }
        known = list(self._catalogue.entries())
        readable = [entry.template for entry in known if entry.template]
        spared = {entry.name for entry in known if entry.template is None}
        return self._current.unused([*templates, *readable], fingerprints, spared)

    def notes_of(self, template: Template) -> list[str]:
        """What became of the settings of a template's image where that is not what its author may expect."""
        return explain(template, self._current.config(template))

    async def outdated(self, template: Template, driver: Driver) -> list[Entry]:
        """What nothing uses any more once the template is built for `driver`: old makings of it, and of what all
        templates share. What other drivers use today is not among them."""
        if await self.find(template, driver) is None:
            return []
        return [
            entry
            for entry in await self.unused([driver], template)
            if entry.kind in SHARED_KINDS or entry.details.get("template") == template.name
        ]

    async def _root(self, template: Template, capabilities: Capabilities) -> Root:
        made = packed = await self._image(template)
        if capabilities.root == "tree":
            make = partial(tree.make_tree, template=template, image=packed.path / image.IMAGE)
            made = await self._steps.take("tree", "tree", tree.tree_inputs(packed.id), make)
        return root_of(capabilities.root, made, packed)

    async def _boot(self, capabilities: Capabilities) -> Boot:
        if capabilities.boots_kernel:
            return boot_kernel(*await self._kernel())
        return boot_agent(await self._steps.take("agent", "agent", guest_code.agent_inputs(), guest_code.make_agent))

    async def _image(self, template: Template) -> Entry:
        plan = plan_image(template)
        if found := self._steps.ready("image", "image", plan.image):
            return found  # whether or not the base it was made from is still there
        source = template.source.debian
        if source is None:
            return await self._image_of_layers(template, plan)
        base = await self._steps.take("base", "base", plan.base, partial(debian.make_base, suite=source.suite))
        tar = base.path / debian.BASE_TAR
        if plan.layer is not None:
            add = partial(debian.make_layer, source=source, base_tar=tar)
            tar = (await self._steps.take("packages", "base", plan.layer, add)).path / debian.BASE_TAR
        make = partial(image.make_image, template=template, base_tar=tar)
        return await self._steps.take("image", "image", plan.image, make)

    async def _image_of_layers(self, template: Template, plan: ImagePlan) -> Entry:
        fetch = oci.make_oci if template.source.oci else dockerfile.make_dockerfile
        layers = await self._steps.take("layers", plan.kind, plan.base, partial(fetch, template=template))
        inputs = interpreter.interpreter_inputs()
        own = await self._steps.take("interpreter", "interpreter", inputs, interpreter.make_interpreter)
        make = partial(
            image.make_layered_image,
            layers_tar=layers.path / oci.LAYERS_TAR,
            interpreter=own.path / interpreter.FOLDER,
            details=layers.details,
        )
        return await self._steps.take("image", "image", plan.image, make)

    async def _kernel(self) -> tuple[Entry, Entry]:
        make = partial(kernel.make_kernel, own=self._own_kernel)
        found = await self._steps.take("kernel", "kernel", kernel.kernel_inputs(self._own_kernel), make)
        inputs = kernel.initramfs_inputs(found.id)
        pack = partial(kernel.make_initramfs, kernel=found.path)
        return found, await self._steps.take("initramfs", "initramfs", inputs, pack)


def _cold(template: Template, root: Root, boot: Boot) -> BuiltTemplate:
    """A template without a snapshot. All that machines of it can differ in is in its version."""
    warm = warm_up(template, root.config)
    version = key_of(snapshot.snapshot_inputs(template, warm, root.id, boot.id, ""))
    return BuiltTemplate(template, root.path, boot.files, warm, None, version)


async def _both(
    first: Callable[[], Awaitable[_First]], second: Callable[[], Awaitable[_Second]]
) -> tuple[_First, _Second]:
    """Run two things at once; if one fails the other is cancelled, and the error comes as it is."""
    firsts: list[_First] = []

    async def run_first() -> None:
        firsts.append(await first())

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_first)
            result = await second()
    except BaseExceptionGroup as group:
        raise innermost(group) from None
    # A group whose tasks were cancelled from outside can end in silence: then there is no result, and this raises.
    await anyio.lowlevel.checkpoint_if_cancelled()
    return firsts[0], result
