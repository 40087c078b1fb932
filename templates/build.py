"""Build templates: run the steps whose results are missing from the store.

    base ──────────────────┐
    layers, interpreter ───┴──> image ──> tree ──┐
                                                 ├──> snapshot
    kernel ──> initramfs ────────────────────────┤
    agent ───────────────────────────────────────┘

The driver's capabilities decide which of these are needed. Every step looks in the store first, so nothing is made
twice.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from templates import debian, dockerfile, guest_code, image, interpreter, kernel, oci, program, snapshot
from templates.catalogue import Catalogue
from templates.chosen_program import ChosenPrograms, chosen_inputs, copy_program
from templates.image_config import check_service, explain
from templates.inventory import (
    SHARED_KINDS,
    STARTING_KINDS,
    Boot,
    ImagePlan,
    Inventory,
    Root,
    boot_agent,
    boot_kernel,
    guest_kernel,
    root_of,
)
from templates.kernel import OwnKernel
from templates.locks import hold
from templates.model import DebianSource, Template
from templates.revisions import Revisions
from templates.snapshot import warm_up_of
from templates.steps import MakeTools, Progress, Steps
from templates.store import META, Entry, Inputs, Store, key_of
from templates.together import both
from templates.tools import LoggedTools
from vmm.driver import Driver, SnapshotDriver
from vmm.types import (
    Capabilities,
    DiskRate,
    Download,
    GuestCode,
    GuestKernel,
    MachineSpec,
    NetworkMode,
    Program,
    Snapshot,
)

if TYPE_CHECKING:
    from guest.client.messages import WarmUp

__all__ = ["Builder", "BuiltTemplate", "Progress"]


@dataclass(frozen=True, slots=True)
class BuiltTemplate:
    """Everything needed to start machines of a template."""

    template: Template
    root: Path
    boot: GuestKernel | GuestCode
    warm_up: "WarmUp"
    snapshot: Snapshot | None  # None: the driver takes none, and each machine is warmed up when it starts
    version: str = ""  # changes whenever machines would be started from something else

    def spec(self, machine_id: str, network: NetworkMode = NetworkMode.NONE) -> MachineSpec:
        """Return what a driver needs to start one machine."""
        size = self.template.machine
        rate = DiskRate(size.disk_mb_per_s, size.disk_iops)
        return MachineSpec(machine_id, self.root, self.boot, size.memory_mb, size.vcpus, size.disk_mb, network, rate)

    def entries(self) -> tuple[Path, ...]:
        """Return the store entries that its machines use: hold them as long as a machine lives."""
        boot = self.boot
        files = [boot.archive] if isinstance(boot, GuestCode) else [boot.vmlinuz, boot.initramfs]
        entries = [file.parent for file in (self.root, *files)]
        return (*entries, self.snapshot.path) if self.snapshot else tuple(entries)

    def exists(self) -> bool:
        """Whether it is still in the store."""
        return self.root.exists() and (self.snapshot is None or self.snapshot.path.exists())


class Builder:
    """Builds templates into a store, and finds earlier builds in it."""

    def __init__(
        self,
        store: Store,
        report: Callable[[Progress], None] = lambda _progress: None,
        *,
        own_kernel: OwnKernel | None = None,
        make_tools: MakeTools = LoggedTools,
        catalogue: Catalogue | None = None,
        revisions: Revisions | None = None,
    ) -> None:
        self._store = store
        self._catalogue = catalogue or Catalogue()
        self._own_kernel = own_kernel
        self._steps = Steps(store, report, make_tools)
        self.inventory = Inventory(store, own_kernel, revisions)

    async def fetch(self, what: Download) -> None:
        """Download what a driver lacks. Load the driver again afterwards."""
        if isinstance(what, Program):
            await self.build_program(what)
        else:
            await self.build_kernel()

    async def build(self, template: Template, driver: Driver) -> BuiltTemplate:
        """Build a template for a driver.

        Raises:
            BuildFailed: a step failed; nothing incomplete is left.
            InvalidTemplate: the template wants a service, but neither it nor its image has a command for it.
        """
        self._store.sweep()
        root, boot = await both(
            partial(self._root, template, driver.capabilities),
            partial(self._boot, driver.capabilities),
        )
        check_service(template, root.config)
        cold = _cold(template, root, boot)
        if not driver.capabilities.snapshot:
            return cold
        assert isinstance(driver, SnapshotDriver)
        spec = cold.spec(f"build-{secrets.token_hex(4)}")
        with hold(cold.entries()):
            entry = await self._steps.run(
                "snapshot",
                "snapshot",
                snapshot.snapshot_inputs(template, cold.warm_up, root.id, boot.id, await driver.fingerprint()),
                partial(snapshot.make_snapshot, template=template, warm_up=cold.warm_up, driver=driver, spec=spec),
            )
        return _warm(cold, driver, entry)

    async def build_image(self, template: Template) -> Path:
        """Build only the root image of a template."""
        return (await self._image(template)).path / image.IMAGE

    async def build_kernel(self) -> GuestKernel:
        """Build the kernel and initramfs, which all templates share."""
        return guest_kernel(*await self._kernel())

    async def build_program(self, wanted: Program) -> Path:
        """Download a driver's program."""
        make, inputs = partial(program.make_program, program=wanted), self.inventory.program_inputs(wanted)
        return program.path_in(await self._steps.run("program", "program", inputs, make), wanted)

    @property
    def chosen(self) -> ChosenPrograms:
        """Which programs the operator chose instead of the downloaded ones."""
        return self.inventory.chosen

    async def copy_program(self, wanted: Program, source: str, sha512: str) -> Path:
        """Copy a driver's program from a path or an address into the store. It is not used until it is chosen."""
        make = partial(copy_program, program=wanted, source=source, sha512=sha512)
        return program.path_in(await self._steps.run("program", "program", chosen_inputs(wanted, sha512), make), wanted)

    async def remove_program(self, wanted: Program, sha512: str) -> None:
        """Remove a copied program from the store, unless it is in use."""
        if self.chosen.sha512_of(wanted) != sha512:
            await self._store.remove("program", key_of(chosen_inputs(wanted, sha512)))

    async def find(self, template: Template, driver: Driver) -> BuiltTemplate | None:
        """Return the build that `build` would return without making anything, or None."""
        root, boot = self.inventory.root(template, driver.capabilities), self.inventory.boot(driver.capabilities)
        if root is None or boot is None:
            return None
        cold = _cold(template, root, boot)
        if not driver.capabilities.snapshot:
            return cold
        assert isinstance(driver, SnapshotDriver)
        inputs = snapshot.snapshot_inputs(template, cold.warm_up, root.id, boot.id, await driver.fingerprint())
        entry = self._store.find("snapshot", inputs)
        return _warm(cold, driver, entry) if entry else None

    async def remove_resized(self, template: Template, driver: Driver, *, keep: int) -> None:
        """Remove the oldest snapshots of a template that were taken with another size than its own, but for `keep`."""
        resized = [
            entry
            for entry in self._store.entries()
            if entry.kind == "snapshot"
            and (entry.details.get("template"), entry.details.get("driver")) == (template.name, driver.name)
            and entry.inputs.get("machine") != snapshot.size_inputs(template)
        ]
        for entry in sorted(resized, key=lambda entry: entry.made, reverse=True)[keep:]:
            await self._store.remove(entry.kind, entry.key)

    async def damaged(self, built: BuiltTemplate) -> list[Entry]:
        """Return the entries of a build whose files have changed since they were made."""
        entries = [self._store.entry(path) for path in built.entries() if (path / META).exists()]
        return [entry for entry in entries if await self._store.damaged_files(entry)]

    def find_kernel(self) -> GuestKernel | None:
        """Return the current kernel and initramfs, if they are built."""
        found = self.inventory.kernel()
        return guest_kernel(*found) if found else None

    def find_program(self, wanted: Program) -> Path | None:
        """Return a driver's chosen or downloaded program, if there is one."""
        found = self.inventory.program(wanted)
        return program.path_in(found, wanted) if found else None

    def stamp(self) -> tuple[int, ...]:
        """Return a value that changes whenever machines may have to start from something else."""
        return (*self._store.stamp(STARTING_KINDS), self.inventory.revisions.stamp())

    def entries_of(self, template: Template) -> list[Entry]:
        """Return a template's entries: images, trees and all its snapshots, outdated ones too.

        Templates with the same inputs share their entries.
        """
        entries = self._store.entries()
        current = {entry.path for entry in self.inventory.entries_for(template, entries, self.inventory.shared())}
        return [
            entry
            for entry in entries
            if entry.kind not in SHARED_KINDS
            and (entry.path in current or entry.details.get("template") == template.name)
        ]

    def exclusive_entries_of(self, template: Template) -> list[Entry]:
        """Return a template's entries without those that other templates use."""
        entries, shared = self._store.entries(), self.inventory.shared()
        others = [known for known in self._catalogue.templates().values() if known.name != template.name]
        theirs = {entry.path for other in others for entry in self.inventory.entries_for(other, entries, shared)}
        return [entry for entry in self.entries_of(template) if entry.path not in theirs]

    async def unused(self, drivers: Iterable[Driver], *templates: Template) -> list[Entry]:
        """Return the entries that neither the catalogue's templates nor `templates` use.

        `drivers` are the usable ones; snapshots of other drivers are kept while they are of current entries. Entries
        of a template with errors are kept.
        """
        fingerprints = {
            driver.name: await driver.fingerprint()
            for driver in drivers
            if driver.capabilities.snapshot and isinstance(driver, SnapshotDriver)
        }
        known = list(self._catalogue.entries())
        readable = [entry.template for entry in known if entry.template]
        spared = {entry.name for entry in known if entry.template is None}
        return self.inventory.unused([*templates, *readable], fingerprints, spared)

    def image_notes(self, template: Template) -> list[str]:
        """Return a sentence for each setting of the template's image that is not used as its author may expect."""
        return explain(template, self.inventory.config(template))

    async def outdated(self, template: Template, driver: Driver) -> list[Entry]:
        """Return the unused entries of the template, and unused shared ones, once it is built for `driver`.

        Entries that other drivers use are not among them.
        """
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
            make = partial(image.make_tree, template=template, image=packed.path / image.IMAGE)
            made = await self._steps.run("tree", "tree", image.tree_inputs(packed.id), make)
        return root_of(capabilities.root, made, packed)

    async def _boot(self, capabilities: Capabilities) -> Boot:
        if capabilities.boots_kernel:
            return boot_kernel(*await self._kernel())
        return boot_agent(await self._steps.run("agent", "agent", guest_code.agent_inputs(), guest_code.make_agent))

    async def _image(self, template: Template) -> Entry:
        plan = self.inventory.plan_image(template)
        if found := self._steps.find("image", "image", plan.image):
            return found  # even if its base has been removed
        source = template.source.debian
        if source is None:
            return await self._image_of_layers(template, plan)
        base = await self._steps.run("base", "base", plan.base, partial(debian.make_base, suite=source.suite))
        tar = base.path / debian.BASE_TAR

        layer = partial(self._layer, plan.layer, source, tar) if plan.layer else None
        make = partial(image.make_image, template=template, base_tar=tar, layer=layer)
        return await self._steps.run("image", "image", plan.image, make)

    async def _layer(self, inputs: Inputs, source: DebianSource, base_tar: Path) -> Path:
        add = partial(debian.make_layer, source=source, base_tar=base_tar)
        return (await self._steps.run("packages", "base", inputs, add)).path / debian.BASE_TAR

    async def _image_of_layers(self, template: Template, plan: ImagePlan) -> Entry:
        fetch = oci.make_oci if template.source.oci else dockerfile.make_dockerfile
        layers = await self._steps.run("layers", plan.kind, plan.base, partial(fetch, template=template))
        inputs = self.inventory.interpreter_inputs()
        own = await self._steps.run("interpreter", "interpreter", inputs, interpreter.make_interpreter)
        make = partial(
            image.make_layered_image,
            layers_tar=layers.path / oci.LAYERS_TAR,
            interpreter=own.path / interpreter.FOLDER,
            details=layers.details,
        )
        return await self._steps.run("image", "image", plan.image, make)

    async def _kernel(self) -> tuple[Entry, Entry]:
        make = partial(kernel.make_kernel, own=self._own_kernel)
        found = await self._steps.run("kernel", "kernel", self.inventory.kernel_inputs(), make)
        inputs = kernel.initramfs_inputs(found.id)
        pack = partial(kernel.make_initramfs, kernel=found.path)
        return found, await self._steps.run("initramfs", "initramfs", inputs, pack)


def _cold(template: Template, root: Root, boot: Boot) -> BuiltTemplate:
    """Return a build without its snapshot. Its version covers everything that machines can differ in."""
    warm = warm_up_of(template, root.config)
    version = key_of(snapshot.snapshot_inputs(template, warm, root.id, boot.id, ""))
    return BuiltTemplate(template, root.path, boot.files, warm, None, version)


def _warm(cold: BuiltTemplate, driver: Driver, entry: Entry) -> BuiltTemplate:
    """Return a build with its snapshot. A snapshot that is taken again is another version."""
    snapshot = Snapshot(driver.name, entry.path)
    return replace(cold, snapshot=snapshot, version=key_of({"cold": cold.version, "snapshot": entry.id}))
