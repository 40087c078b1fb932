"""Find out which entries have newer packages in Debian's archive, or a newer image behind their tag."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from urllib.parse import unquote

from templates import interpreter, kernel, oci
from templates.debian import BASE_TAR, base_inputs, layer_inputs, sources_of
from templates.inventory import Inventory
from templates.model import DebianSource, Template
from templates.private_apt import PrivateApt, Upgrade
from templates.program import program_inputs, program_sources
from templates.revisions import next_revision
from templates.store import Entry, Inputs, Store, key_of
from templates.tools import StepFailed, Tools
from vmm.driver import driver_infos

_DPKG_STATUS = "./var/lib/dpkg/status"


@dataclass(frozen=True, slots=True)
class Update:
    """An entry that has to be made again, and why."""

    part: str  # what it is, for people
    key: str  # of the entry without a revision
    revision: str  # its next one
    upgrades: tuple[Upgrade, ...]  # empty if the entry is missing, so that its versions are unknown


async def find_updates(
    store: Store, inventory: Inventory, templates: Iterable[Template], tools: Tools, work: Path
) -> list[Update]:
    """Return the updates for what these templates and their machines are made from; raises StepFailed.

    `work` is an empty directory.
    """
    check = _Check(store, inventory, tools, work)
    for template in templates:
        await check.template(template)
    await check.downloads()
    return list(check.updates.values())


class _Check:
    def __init__(self, store: Store, inventory: Inventory, tools: Tools, work: Path) -> None:
        self.updates: dict[str, Update] = {}  # by key
        self._store = store
        self._inventory = inventory
        self._tools = tools
        self._work = work
        self._apts: dict[str, PrivateApt] = {}  # by sources
        self._checked: set[str] = set()  # keys

    async def template(self, template: Template) -> None:
        source = template.source.debian
        if source is not None:
            await self._debian(template, source)
            return
        if (agents_python := self._entry("interpreter", inputs := interpreter.interpreter_inputs())) is not None:
            apt = await self._apt(interpreter.interpreter_sources())
            newest = await apt.newest(*interpreter.PACKAGES)
            self._add("the agent's Python", inputs, changed(agents_python.details["packages"], newest))
        if template.source.oci is not None:
            await self._tag(template)

    async def downloads(self) -> None:
        """Check the guest kernel and the programs of drivers."""
        # A custom kernel is not ours to update.
        guest_kernel = self._entry("kernel", inputs := kernel.kernel_inputs(None))
        if guest_kernel is not None:
            apt = await self._apt(kernel.kernel_sources())
            newest = await apt.newest(*await kernel.kernel_packages(apt))
            self._add("the guest kernel", inputs, changed(guest_kernel.details["packages"], newest))
        for program in filter(None, (info.program for info in driver_infos())):
            if (found := self._entry("program", inputs := program_inputs(program))) is not None:
                newest = await (await self._apt(program_sources(program))).newest(program.package)
                self._add(program.title, inputs, changed([found.details["package"]], newest))

    async def _debian(self, template: Template, source: DebianSource) -> None:
        base = base_inputs(source.suite)
        await self._installed(f"Debian {source.suite}", base, template, source.suite, ())
        layer = layer_inputs(key_of(self._inventory.revisions.apply(base)), source)
        # The layers of a base that is made again are made again anyway.
        if layer is not None and key_of(base) not in self.updates:
            await self._installed(f"the packages of {template.name}", layer, template, source.suite, source.packages)

    async def _installed(
        self, part: str, inputs: Inputs, template: Template, suite: str, packages: Sequence[str]
    ) -> None:
        """Check the packages that are installed in a base."""
        if key_of(inputs) in self._checked:
            return
        entry = self._entry("base", inputs)
        if entry is None:
            if self._store.find("image", self._inventory.plan_image(template).image):
                self._add(part, inputs, (), unknown=True)
            return
        sources = sources_of(suite, packages)
        if sources is None:
            raise StepFailed("updates can only be found on a Debian host that uses Debian's package sources")
        apt = await self._apt(sources)
        folder = self._work / entry.key
        folder.mkdir()
        await self._tools.run(
            ["tar", "--extract", f"--file={entry.path / BASE_TAR}", f"--directory={folder}", _DPKG_STATUS]
        )
        self._add(part, inputs, await apt.upgrades(folder / _DPKG_STATUS, suite))

    async def _tag(self, template: Template) -> None:
        """Check whether the tag of an image in a registry points to a new digest."""
        inputs = oci.oci_inputs(template)
        layers = self._entry("layers", inputs)
        if layers is None or not oci.has_moving_tag(template):
            return
        digest = await oci.resolve_digest(self._tools, self._work, inputs["image"])
        old = layers.details["digest"]
        self._add(
            f"the image of {template.name}", inputs, [Upgrade(inputs["image"], old, digest)] if old != digest else []
        )

    def _entry(self, kind: str, inputs: Inputs) -> Entry | None:
        """Return the current revision of an entry, unless it has been checked before."""
        if key_of(inputs) in self._checked:
            return None
        self._checked.add(key_of(inputs))
        return self._store.find(kind, self._inventory.revisions.apply(inputs))

    async def _apt(self, sources: str) -> PrivateApt:
        if sources not in self._apts:
            self._tools.note("downloading package lists")
            work = self._work / f"apt-{len(self._apts)}"
            self._apts[sources] = PrivateApt(self._tools, work, sources, lists=self._work / "lists")
            await self._apts[sources].update()
        return self._apts[sources]

    def _add(self, part: str, inputs: Inputs, upgrades: Sequence[Upgrade], *, unknown: bool = False) -> None:
        if upgrades or unknown:
            key = key_of(inputs)
            revision = next_revision(
                self._inventory.revisions.of(key), [list(astuple(upgrade)) for upgrade in upgrades]
            )
            self.updates[key] = Update(part, key, revision, tuple(upgrades))


def changed(stored: Iterable[str], newest: Iterable[str]) -> list[Upgrade]:
    """Compare downloaded packages, written NAME_VERSION_ARCH, with the newest ones of those that matter.

    The name of a kernel package contains its version, so a new kernel is a new package.
    """
    old = dict(_name_and_version(package) for package in stored)
    new = dict(_name_and_version(package) for package in newest)
    return [Upgrade(name, old.get(name, ""), version) for name, version in new.items() if old.get(name) != version]


def _name_and_version(package: str) -> tuple[str, str]:
    name, version, _architecture = package.rsplit("_", 2)
    return name, unquote(version)
