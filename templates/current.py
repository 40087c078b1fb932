"""Which entries of the store are current: made from the code, the templates and the settings as they are now."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from templates.debian import base_inputs, layer_inputs
from templates.guest_code import AGENT, agent_inputs
from templates.image import IMAGE, image_inputs
from templates.kernel import INITRAMFS, VMLINUZ, OwnKernel, initramfs_inputs, kernel_inputs
from templates.model import Template, find_templates
from templates.runsc import runsc_inputs
from templates.snapshot import snapshot_inputs
from templates.store import Entry, Store, key_of
from templates.tree import TREE, tree_inputs
from templates.warmup import ImageConfig, warm_up
from vmm.types import Capabilities, GuestCode, GuestKernel

SHARED_KINDS = ("base", "kernel", "initramfs", "agent", "runsc")  # made for all templates


@dataclass(frozen=True, slots=True)
class Root:
    """A root file system, and which making of it."""

    path: Path
    id: str


@dataclass(frozen=True, slots=True)
class Boot:
    """What starts in a machine, and which making of it."""

    files: GuestKernel | GuestCode
    id: str


def root_of(shape: Literal["image", "tree"], entry: Entry) -> Root:
    """A root file system from its entry."""
    return Root(entry.path / (IMAGE if shape == "image" else TREE), entry.id)


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


def plan_image(template: Template) -> ImagePlan:
    """What the image of a template is made from."""
    source = template.source.debian
    assert source is not None
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
        found = self._image(template) if capabilities.root == "image" else self._tree(template)
        return root_of(capabilities.root, found) if found else None

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

    def outdated(self, template: Template, driver: str, snapshot: Path | None) -> list[Entry]:
        """What no driver can use any more, of one template and of what all templates share.

        `snapshot` is the one in force for `driver`. Another driver's snapshots stay if they were taken of what is
        current: whether they still fit its monitor only that driver knows.
        """
        entries = self._store.entries()
        used = {entry.path for known in (template, *find_templates().values()) for entry in self._made_for(known)}
        kernel = self._kernel()
        shared = (kernel, self._initramfs(kernel), self._agent(), self.runsc())
        used |= {entry.path for entry in shared if entry}
        ids = {entry.id for entry in entries if entry.path in used}

        def in_use(entry: Entry) -> bool:
            if entry.kind != "snapshot":
                return entry.path in used
            if entry.details["driver"] == driver:
                return entry.path == snapshot
            return _taken_of(entry, template, ids)

        return [
            entry
            for entry in entries
            if (entry.kind in SHARED_KINDS or entry.details.get("template") == template.name) and not in_use(entry)
        ]

    def _made_for(self, template: Template) -> list[Entry]:
        plan = plan_image(template)
        layers = [self._get("base", inputs) for inputs in (plan.base, plan.layer) if inputs]
        return [entry for entry in (*layers, self._image(template), self._tree(template)) if entry]

    def _image(self, template: Template) -> Entry | None:
        return self._get("image", plan_image(template).image)

    def _tree(self, template: Template) -> Entry | None:
        image = self._image(template)
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


def _taken_of(snapshot: Entry, template: Template, ids: Collection[str]) -> bool:
    """Whether a snapshot is one of the template as it is, taken of entries with one of these ids."""
    root, boot, fingerprint = (str(snapshot.inputs.get(name)) for name in ("root", "boot", "driver"))
    return (
        root in ids
        and boot in ids
        and snapshot.inputs == snapshot_inputs(template, warm_up(template, ImageConfig()), root, boot, fingerprint)
    )
