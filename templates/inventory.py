"""Look up which store entries are current: made from today's code, templates and settings. Nothing here builds."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from templates.chosen_program import ChosenPrograms, chosen_inputs
from templates.debian import base_inputs, layer_inputs
from templates.dockerfile import dockerfile_inputs
from templates.guest_code import AGENT, agent_inputs
from templates.image import IMAGE, TREE, image_inputs, layered_image_inputs, tree_inputs
from templates.image_config import ImageConfig, from_details
from templates.interpreter import interpreter_inputs
from templates.kernel import INITRAMFS, VMLINUZ, OwnKernel, initramfs_inputs, kernel_inputs
from templates.model import Template
from templates.oci import oci_inputs
from templates.program import program_inputs
from templates.revisions import Revisions
from templates.snapshot import snapshot_inputs, warm_up_of
from templates.store import Entry, Inputs, Store, key_of
from vmm.driver import driver_infos
from vmm.types import Capabilities, GuestCode, GuestKernel, Program

SHARED_KINDS = ("base", "interpreter", "kernel", "initramfs", "agent", "program")  # used by all templates
STARTING_KINDS = ("image", "tree", "kernel", "initramfs", "agent", "snapshot")  # machines start from these


@dataclass(frozen=True, slots=True)
class Root:
    """A root file system, its entry's id, and its image's process settings."""

    path: Path
    id: str
    config: ImageConfig


@dataclass(frozen=True, slots=True)
class Boot:
    """What a machine boots, and its entry's id."""

    files: GuestKernel | GuestCode
    id: str


def root_of(shape: Literal["image", "tree"], entry: Entry, image: Entry) -> Root:
    """Return a root file system from its entry and its image's entry. For an image they are the same."""
    return Root(entry.path / (IMAGE if shape == "image" else TREE), entry.id, from_details(image.details))


def guest_kernel(kernel: Entry, initramfs: Entry) -> GuestKernel:
    """Return the files of a kernel from its entries."""
    return GuestKernel(kernel.path / VMLINUZ, initramfs.path / INITRAMFS)


def boot_kernel(kernel: Entry, initramfs: Entry) -> Boot:
    """Return a kernel to boot. The initramfs's id identifies both: it was made for this kernel."""
    return Boot(guest_kernel(kernel, initramfs), initramfs.id)


def boot_agent(agent: Entry) -> Boot:
    """Return the agent to start, for drivers without a kernel."""
    return Boot(GuestCode(agent.path / AGENT), agent.id)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The inputs of every entry that an image is made from, known before anything is built."""

    base: Inputs
    layer: Inputs | None
    image: Inputs
    kind: str = "base"  # of base and layer


class Inventory:
    """The current entries of a store."""

    def __init__(self, store: Store, own_kernel: OwnKernel | None, revisions: Revisions | None = None) -> None:
        self._store = store
        self._own_kernel = own_kernel
        self.revisions = revisions or Revisions(store.home)
        self.chosen = ChosenPrograms(store.home)

    def plan_image(self, template: Template) -> ImagePlan:
        """Return the inputs of a template's image."""
        source = template.source.debian
        if source is None:
            layers = self.revisions.apply(oci_inputs(template) if template.source.oci else dockerfile_inputs(template))
            image = layered_image_inputs(key_of(layers), key_of(self.interpreter_inputs()))
            return ImagePlan(layers, None, image, kind="layers")
        base = self.revisions.apply(base_inputs(source.suite))
        added = layer_inputs(key_of(base), source)
        layer = self.revisions.apply(added) if added else None
        return ImagePlan(base, layer, image_inputs(template, key_of(layer or base)))

    def kernel_inputs(self) -> Inputs:
        """Return the inputs of the guest kernel."""
        return self.revisions.apply(kernel_inputs(self._own_kernel))

    def interpreter_inputs(self) -> Inputs:
        """Return the inputs of the agent's Python."""
        return self.revisions.apply(interpreter_inputs())

    def program_inputs(self, program: Program) -> Inputs:
        """Return the inputs of a driver's downloaded program."""
        return self.revisions.apply(program_inputs(program))

    def root(self, template: Template, capabilities: Capabilities) -> Root | None:
        """Return a template's root file system in the form that the driver needs."""
        image = self._image(template)
        found = image if capabilities.root == "image" else self._tree(image)
        return root_of(capabilities.root, found, image) if found and image else None

    def boot(self, capabilities: Capabilities) -> Boot | None:
        """Return what the driver's machines boot."""
        if not capabilities.boots_kernel:
            agent = self._agent()
            return boot_agent(agent) if agent else None
        kernels = self.kernel()
        return boot_kernel(*kernels) if kernels else None

    def kernel(self) -> tuple[Entry, Entry] | None:
        """Return the kernel and the initramfs."""
        kernel = self._kernel()
        initramfs = self._initramfs(kernel)
        return (kernel, initramfs) if kernel and initramfs else None

    def program(self, program: Program) -> Entry | None:
        """Return the program that the operator chose for a driver, else the downloaded one."""
        chosen = self.chosen.sha512_of(program)
        return self._store.find("program", chosen_inputs(program, chosen) if chosen else self.program_inputs(program))

    def config(self, template: Template) -> ImageConfig:
        """Return the process settings of a template's image; empty if it is not built."""
        image = self._image(template)
        return from_details(image.details) if image else ImageConfig()

    def shared(self) -> list[Entry]:
        """Return the current entries that all templates share. Call it once: it hashes files."""
        kernel = self._kernel()
        interpreter = self._store.find("interpreter", self.interpreter_inputs())
        programs = [self.program(info.program) for info in driver_infos() if info.program]
        shared = (kernel, self._initramfs(kernel), self._agent(), *programs, interpreter)
        return [entry for entry in shared if entry]

    def unused(
        self, templates: Iterable[Template], fingerprints: Mapping[str, str], spared: Collection[str] = ()
    ) -> list[Entry]:
        """Return the entries that none of `templates` is made from or started from, with any driver.

        `fingerprints` are those of the usable drivers. Snapshots of other drivers are kept if they were taken of
        current entries: only the driver knows whether they still fit. So are entries made for a template in `spared`.
        """
        entries, shared = self._store.entries(), self.shared()
        used, kept = {entry.path for entry in shared}, set(spared)
        for template in templates:
            try:
                used |= {entry.path for entry in self.entries_for(template, entries, shared, fingerprints)}
            except OSError:  # such as an unreadable file beside its Dockerfile: its inputs are unknown
                kept.add(template.name)
        return [entry for entry in entries if entry.path not in used and entry.details.get("template") not in kept]

    def entries_for(
        self,
        template: Template,
        entries: Iterable[Entry],
        shared: Iterable[Entry],
        fingerprints: Mapping[str, str] | None = None,
    ) -> list[Entry]:
        """Return those of `entries` that a template is made from or, apart from the `shared` ones, started from."""
        sources = self._sources(template)
        ids = {entry.id for entry in (*sources, *shared)}
        known, config = fingerprints or {}, self.config(template)

        def fits(snapshot: Entry) -> bool:
            """Whether the snapshot fits its driver, as far as the driver's fingerprint is known."""
            taken_with = snapshot.inputs.get("driver")
            return known.get(str(snapshot.details.get("driver")), taken_with) == taken_with

        snapshots = [
            entry for entry in entries if entry.kind == "snapshot" and _is_snapshot_of(entry, template, config, ids)
        ]
        return [*sources, *filter(fits, snapshots)]

    def _sources(self, template: Template) -> list[Entry]:
        plan = self.plan_image(template)
        layers = [self._store.find(plan.kind, inputs) for inputs in (plan.base, plan.layer) if inputs]
        image = self._store.find("image", plan.image)
        return [entry for entry in (*layers, image, self._tree(image)) if entry]

    def _image(self, template: Template) -> Entry | None:
        return self._store.find("image", self.plan_image(template).image)

    def _tree(self, image: Entry | None) -> Entry | None:
        return self._store.find("tree", tree_inputs(image.id)) if image else None

    def _kernel(self) -> Entry | None:
        return self._store.find("kernel", self.kernel_inputs())

    def _initramfs(self, kernel: Entry | None) -> Entry | None:
        return self._store.find("initramfs", initramfs_inputs(kernel.id)) if kernel else None

    def _agent(self) -> Entry | None:
        return self._store.find("agent", agent_inputs())


def _is_snapshot_of(snapshot: Entry, template: Template, config: ImageConfig, ids: Collection[str]) -> bool:
    """Whether a snapshot was taken of the template as it is now and of entries with these ids."""
    root, boot, fingerprint = (str(snapshot.inputs.get(name)) for name in ("root", "boot", "driver"))
    inputs = snapshot_inputs(template, warm_up_of(template, config), root, boot, fingerprint)
    return root in ids and boot in ids and snapshot.key == key_of(inputs)
