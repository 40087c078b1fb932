"""Which entries of the store are current: made from the code, the templates and the settings as they are now."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from templates.debian import base_inputs, layer_inputs
from templates.dockerfile import dockerfile_inputs
from templates.guest_code import AGENT, agent_inputs
from templates.image import IMAGE, image_inputs, layered_image_inputs
from templates.image_config import from_details
from templates.interpreter import interpreter_inputs
from templates.kernel import INITRAMFS, VMLINUZ, OwnKernel, initramfs_inputs, kernel_inputs
from templates.model import Template
from templates.oci import oci_inputs
from templates.runsc import runsc_inputs
from templates.snapshot import snapshot_inputs
from templates.store import Entry, Store, key_of
from templates.tree import TREE, tree_inputs
from templates.warmup import ImageConfig, warm_up
from vmm.types import Capabilities, GuestCode, GuestKernel

SHARED_KINDS = ("base", "interpreter", "kernel", "initramfs", "agent", "runsc")  # made for all templates
STARTING_KINDS = ("image", "tree", "kernel", "initramfs", "agent", "snapshot")  # what machines are started from


@dataclass(frozen=True, slots=True)
class Root:
    """A root file system, which making of it, and what its image says about the processes in it."""

    path: Path
    id: str
    config: ImageConfig


@dataclass(frozen=True, slots=True)
class Boot:
    """What starts in a machine, and which making of it."""

    files: GuestKernel | GuestCode
    id: str


def root_of(shape: Literal["image", "tree"], entry: Entry, image: Entry) -> Root:
    """A root file system from its entry and that of its image, which are one and the same unless it is a tree."""
    return Root(entry.path / (IMAGE if shape == "image" else TREE), entry.id, from_details(image.details))


def guest_kernel(kernel: Entry, initramfs: Entry) -> GuestKernel:
    """The files of a kernel from its entries."""
    return GuestKernel(kernel.path / VMLINUZ, initramfs.path / INITRAMFS)


def boot_kernel(kernel: Entry, initramfs: Entry) -> Boot:
    """A kernel to start with. One id stands for both: an initramfs is made for one making of a kernel."""
    return Boot(guest_kernel(kernel, initramfs), initramfs.id)


def boot_agent(agent: Entry) -> Boot:
    """The agent to start with, where there is no kernel."""
    return Boot(GuestCode(agent.path / AGENT), agent.id)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The inputs of every entry on the way to an image, known before anything is made."""

    base: Mapping[str, Any]
    layer: Mapping[str, Any] | None
    image: Mapping[str, Any]
    kind: str = "base"  # of base and layer


def plan_image(template: Template) -> ImagePlan:
    """What the image of a template is made from."""
    source = template.source.debian
    if source is None:
        layers = oci_inputs(template) if template.source.oci else dockerfile_inputs(template)
        image = layered_image_inputs(key_of(layers), key_of(interpreter_inputs()))
        return ImagePlan(layers, None, image, kind="layers")
    base = base_inputs(source.suite)
    layer = layer_inputs(key_of(base), source)
    return ImagePlan(base, layer, image_inputs(template, key_of(layer or base)))


class Current:
    """Looks things up and makes none."""

    def __init__(self, store: Store, own_kernel: OwnKernel | None) -> None:
        self._store = store
        self._own_kernel = own_kernel

    def root(self, template: Template, capabilities: Capabilities) -> Root | None:
        """The root file system of a template, in the shape a driver wants."""
        image = self._image(template)
        found = image if capabilities.root == "image" else self._tree(image)
        return root_of(capabilities.root, found, image) if found and image else None

    def boot(self, capabilities: Capabilities) -> Boot | None:
        """What a driver's machines start with."""
        if not capabilities.boots_kernel:
            agent = self._agent()
            return boot_agent(agent) if agent else None
        kernels = self.kernel()
        return boot_kernel(*kernels) if kernels else None

    def kernel(self) -> tuple[Entry, Entry] | None:
        """Kernel and initramfs."""
        kernel = self._kernel()
        initramfs = self._initramfs(kernel)
        return (kernel, initramfs) if kernel and initramfs else None

    def runsc(self) -> Entry | None:
        """A gVisor of our own."""
        return self._get("runsc", runsc_inputs())

    def unused(
        self, templates: Iterable[Template], fingerprints: Mapping[str, str], spared: Collection[str] = ()
    ) -> list[Entry]:
        """What none of `templates` is made from or started from any more, by any driver.

        `fingerprints` are of the drivers that can be asked. Snapshots of the others stay if they were taken of what is
        current: whether they still fit its monitor only that driver knows. What was made for a template whose name is
        in `spared` stays, too.
        """
        entries, shared = self._store.entries(), self.shared()
        used, kept = {entry.path for entry in shared}, set(spared)
        for template in templates:
            try:
                used |= {entry.path for entry in self.made_for(template, entries, shared, fingerprints)}
            except OSError:  # a file beside its Dockerfile that may not be read, say: nobody knows what it is made from
                kept.add(template.name)
        return [entry for entry in entries if entry.path not in used and entry.details.get("template") not in kept]

    def shared(self) -> list[Entry]:
        """What machines of all templates are started with. Finding it hashes files, so ask once."""
        kernel = self._kernel()
        interpreter = self._get("interpreter", interpreter_inputs())
        shared = (kernel, self._initramfs(kernel), self._agent(), self.runsc(), interpreter)
        return [entry for entry in shared if entry]

    def made_for(
        self,
        template: Template,
        entries: Iterable[Entry],
        shared: Iterable[Entry],
        fingerprints: Mapping[str, str] | None = None,
    ) -> list[Entry]:
        """What of `entries` a template is made from and, beside what is `shared`, started from as it is now."""
        made = self._made_for(template)
        ids = {entry.id for entry in (*made, *shared)}
        known, config = fingerprints or {}, self.config(template)

        def fits(snapshot: Entry) -> bool:
            """Whether its driver would take it, as far as anybody knows."""
            taken_under = snapshot.inputs.get("driver")
            return known.get(str(snapshot.details.get("driver")), taken_under) == taken_under

        snapshots = [entry for entry in entries if entry.kind == "snapshot" and _taken_of(entry, template, config, ids)]
        return [*made, *filter(fits, snapshots)]

    def config(self, template: Template) -> ImageConfig:
        """What the image of a template says; nothing if there is none."""
        image = self._image(template)
        return from_details(image.details) if image else ImageConfig()

    def _made_for(self, template: Template) -> list[Entry]:
        plan = plan_image(template)
        layers = [self._get(plan.kind, inputs) for inputs in (plan.base, plan.layer) if inputs]
        image = self._get("image", plan.image)
        return [entry for entry in (*layers, image, self._tree(image)) if entry]

    def _image(self, template: Template) -> Entry | None:
        return self._get("image", plan_image(template).image)

    def _tree(self, image: Entry | None) -> Entry | None:
        return self._get("tree", tree_inputs(image.id)) if image else None

    def _kernel(self) -> Entry | None:
        return self._get("kernel", kernel_inputs(self._own_kernel))

    def _initramfs(self, kernel: Entry | None) -> Entry | None:
        return self._get("initramfs", initramfs_inputs(kernel.id)) if kernel else None

    def _agent(self) -> Entry | None:
        return self._get("agent", agent_inputs())

    def _get(self, kind: str, inputs: Mapping[str, Any]) -> Entry | None:
        path = self._store.get(kind, inputs)
        return self._store.entry(path) if path else None


def _taken_of(snapshot: Entry, template: Template, config: ImageConfig, ids: Collection[str]) -> bool:
    """Whether a snapshot is one of the template as it is, taken of entries with one of these ids."""
    root, boot, fingerprint = (str(snapshot.inputs.get(name)) for name in ("root", "boot", "driver"))
    inputs = snapshot_inputs(template, warm_up(template, config), root, boot, fingerprint)
    return root in ids and boot in ids and snapshot.path.name == key_of(inputs)  # what was read back has no tuples
