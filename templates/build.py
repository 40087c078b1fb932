"""From a template to something machines can be restored from, step by step.

    base ──> image ──┐
                     ├──> snapshot
    kernel ──────────┘

Every step looks into the store first, so that what did not change is not made again.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.lowlevel

from guest.errors import GuestError
from templates import debian, image, kernel, snapshot
from templates.errors import BuildFailed
from templates.kernel import OwnKernel
from templates.model import Template, find_templates
from templates.store import Entry, Store, key_of
from templates.tools import LoggedTools, StepFailed, Tools, tail
from vmm.driver import SnapshotDriver
from vmm.errors import VmmError
from vmm.types import GuestKernel, MachineSpec, Snapshot

_First = TypeVar("_First")
_Second = TypeVar("_Second")

SHARED_KINDS = ("base", "kernel", "initramfs")  # made for several templates

Step = Literal["base", "packages", "image", "kernel", "initramfs", "snapshot"]
State = Literal["started", "running", "done", "ready"]  # ready: was made before
MakeStep = Callable[[Tools, Path], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Something to show to whoever waits for a build."""

    step: Step
    state: State
    message: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class BuiltTemplate:
    """All that is needed to restore machines of a template."""

    template: Template
    root: Path
    boot: GuestKernel
    snapshot: Snapshot

    def spec(self, machine_id: str) -> MachineSpec:
        """What a driver needs to start one machine of this template."""
        return _spec(self.template, self.root, self.boot, machine_id)


class Builder:
    """Builds templates into a store, and finds in it what was built before."""

    def __init__(
        self,
        store: Store,
        report: Callable[[Progress], None] = lambda _progress: None,
        *,
        own_kernel: OwnKernel | None = None,
        make_tools: Callable[[Path, Callable[[str], None]], Tools] = LoggedTools,
    ) -> None:
        self._store = store
        self._report = report
        self._own_kernel = own_kernel
        self._make_tools = make_tools

    async def build(self, template: Template, driver: SnapshotDriver) -> BuiltTemplate:
        """Make what is missing of a template; raises BuildFailed, after which nothing half-made is left."""
        self._store.sweep()
        image_entry, kernel_entries = await _both(
            partial(self._image, template),
            self._kernel,
        )
        guest_kernel = _guest_kernel(*kernel_entries)
        image_path = image_entry.path / image.IMAGE
        spec = _spec(template, image_path, guest_kernel, f"build-{secrets.token_hex(4)}")
        entry = await self._step(
            "snapshot",
            "snapshot",
            snapshot.snapshot_inputs(template, image_entry, kernel_entries[1], await driver.fingerprint()),
            partial(snapshot.make_snapshot, template=template, driver=driver, spec=spec),
        )
        return BuiltTemplate(template, image_path, guest_kernel, Snapshot(driver.name, entry.path))

    async def build_image(self, template: Template) -> Path:
        """Make the root image of a template, for those who need no snapshot."""
        return (await self._image(template)).path / image.IMAGE

    async def build_kernel(self) -> GuestKernel:
        """Make kernel and initramfs, which all templates share."""
        return _guest_kernel(*await self._kernel())

    async def find(self, template: Template, driver: SnapshotDriver) -> BuiltTemplate | None:
        """What `build` would return without making anything, or None."""
        image_entry, kernel_entries = self._find_image(template), self._find_kernel()
        if image_entry is None or kernel_entries is None:
            return None
        inputs = snapshot.snapshot_inputs(template, image_entry, kernel_entries[1], await driver.fingerprint())
        path = self._store.get("snapshot", inputs)
        if path is None:
            return None
        guest_kernel = _guest_kernel(*kernel_entries)
        return BuiltTemplate(template, image_entry.path / image.IMAGE, guest_kernel, Snapshot(driver.name, path))

    def find_kernel(self) -> GuestKernel | None:
        """Kernel and initramfs, if they were made for the code as it is now."""
        found = self._find_kernel()
        return _guest_kernel(*found) if found else None

    def entries_of(self, template: Template) -> list[Entry]:
        """What the store holds for one template alone: its images and all snapshots ever taken of it."""
        return [entry for entry in self._store.entries() if entry.details.get("template") == template.name]

    async def outdated(self, template: Template, driver: SnapshotDriver) -> list[Entry]:
        """What nothing uses any more once the template is built for `driver`: its old images and snapshots, and bases,
        kernels and initramfs that no template is made from today."""
        current = await self.find(template, driver)
        kernels = self._find_kernel()
        if current is None or kernels is None:
            return []
        plans = [_plan_image(known) for known in (template, *find_templates().values())]
        bases = [self._store.get("base", inputs) for plan in plans for inputs in (plan.base, plan.layer) if inputs]
        used = {current.root.parent, current.snapshot.path, *bases, *(entry.path for entry in kernels)}
        own = {entry.path for entry in self.entries_of(template) if entry.details.get("driver") in (None, driver.name)}
        return [
            entry
            for entry in self._store.entries()
            if entry.path not in used and (entry.path in own or entry.kind in SHARED_KINDS)
        ]

    async def _image(self, template: Template) -> Entry:
        plan = _plan_image(template)
        if found := self._ready("image", "image", plan.image):
            return found  # whether or not the base it was made from is still there
        suite, packages = template.source.debian.suite, template.source.debian.packages
        base = await self._step("base", "base", plan.base, partial(debian.make_base, suite=suite))
        tar = base.path / debian.BASE_TAR
        if plan.layer is not None:
            add = partial(debian.make_layer, suite=suite, base_tar=tar, packages=packages)
            tar = (await self._step("packages", "base", plan.layer, add)).path / debian.BASE_TAR
        make = partial(image.make_image, template=template, base_tar=tar)
        return await self._step("image", "image", plan.image, make)

    def _find_image(self, template: Template) -> Entry | None:
        path = self._store.get("image", _plan_image(template).image)
        return self._store.entry(path) if path else None

    async def _kernel(self) -> tuple[Entry, Entry]:
        make = partial(kernel.make_kernel, own=self._own_kernel)
        found = await self._step("kernel", "kernel", kernel.kernel_inputs(self._own_kernel), make)
        initramfs = await self._step(
            "initramfs",
            "initramfs",
            kernel.initramfs_inputs(found.id),
            partial(kernel.make_initramfs, kernel=found.path),
        )
        return found, initramfs

    def _find_kernel(self) -> tuple[Entry, Entry] | None:
        path = self._store.get("kernel", kernel.kernel_inputs(self._own_kernel))
        if path is None:
            return None
        found = self._store.entry(path)
        path = self._store.get("initramfs", kernel.initramfs_inputs(found.id))
        return (found, self._store.entry(path)) if path else None

    def _ready(self, step: Step, kind: str, inputs: Mapping[str, Any]) -> Entry | None:
        path = self._store.get(kind, inputs)
        if path is None:
            return None
        self._report(Progress(step, "ready", "made before", 0.0))
        return self._store.entry(path)

    async def _step(self, step: Step, kind: str, inputs: Mapping[str, Any], make: MakeStep) -> Entry:
        """The result of one step, found or made; every failure becomes BuildFailed."""
        if found := self._ready(step, kind, inputs):
            return found
        started = time.monotonic()
        log_path = self._store.logs / f"{step}-{key_of(inputs)}.log"

        def tell(state: State, message: str) -> None:
            self._report(Progress(step, state, message, time.monotonic() - started))

        async def make_logged(staging: Path) -> Mapping[str, Any]:
            return await make(self._make_tools(log_path, partial(tell, "running")), staging)

        tell("started", "")
        try:
            path = await self._store.obtain(kind, inputs, make_logged)
        except (StepFailed, VmmError, GuestError, OSError, BaseExceptionGroup) as error:
            cause = _innermost(error)
            if not isinstance(cause, StepFailed | VmmError | GuestError | OSError):
                raise
            raise BuildFailed(step, str(cause), log_tail=tail(log_path), log_path=log_path) from cause
        tell("done", "")
        return self._store.entry(path)


@dataclass(frozen=True, slots=True)
class _ImagePlan:
    """The inputs of every entry on the way to an image, known before anything is made."""

    base: Mapping[str, Any]
    layer: Mapping[str, Any] | None
    image: Mapping[str, Any]


def _plan_image(template: Template) -> _ImagePlan:
    source = template.source.debian
    base = debian.base_inputs(source.suite)
    layer = debian.layer_inputs(key_of(base), source.packages) if source.packages else None
    return _ImagePlan(base, layer, image.image_inputs(template, key_of(layer or base)))


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
        raise _innermost(group) from None
    # A group whose tasks were cancelled from outside can end in silence: then there is no result, and this raises.
    await anyio.lowlevel.checkpoint_if_cancelled()
    return firsts[0], result


def _innermost(error: BaseException) -> BaseException:
    """The first real error in a group of errors: the others only followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _guest_kernel(kernel_entry: Entry, initramfs: Entry) -> GuestKernel:
    return GuestKernel(kernel_entry.path / kernel.VMLINUZ, initramfs.path / kernel.INITRAMFS)


def _spec(template: Template, image_path: Path, guest_kernel: GuestKernel, machine_id: str) -> MachineSpec:
    size = template.machine
    return MachineSpec(machine_id, image_path, guest_kernel, size.memory_mb, size.vcpus, size.disk_mb)
