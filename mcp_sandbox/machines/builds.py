"""The builds that machines start from, looked up again whenever a build or a template changes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from mcp_sandbox.errors import TemplateDamaged, TemplateNotBuilt
from mcp_sandbox.machines.mapping import map_errors
from mcp_sandbox.machines.provider import find_template
from templates.build import Builder, BuiltTemplate
from templates.catalogue import Catalogue
from templates.locks import hold
from templates.model import MachineSize, Template
from vmm.driver import Driver

MAX_SIZES = 3  # of a template, other than its own, whose snapshots are kept
HOLD_TRIES = 3  # a newer build may remove the one that was just found


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The result of a lookup, and the state of the store at that time."""

    template: Template
    stamp: tuple[int, ...]
    built: BuiltTemplate | None

    def is_fresh(self, template: Template, stamp: tuple[int, ...]) -> bool:
        """Whether another lookup would give the same result."""
        return self.template == template and self.stamp == stamp and (self.built is None or self.built.exists())


class Builds:
    """The builds of all templates for one driver."""

    def __init__(self, driver: Driver, builder: Builder, catalogue: Catalogue) -> None:
        self._driver = driver
        self._builder = builder
        self._catalogue = catalogue
        self._lookups: dict[str, _Lookup] = {}  # a lookup hashes files, which is too slow for every restore

    def templates(self) -> Mapping[str, Template]:
        """Return all templates of the catalogue without errors."""
        return self._catalogue.templates()

    async def version(self, template: str) -> str:
        """Return the version of the build that the next machine of a template would start from.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, SandboxError: no machine can start.
        """
        return (await self._find(template)).version

    async def hold(self, name: str, stack: ExitStack, size: MachineSize | None = None) -> BuiltTemplate:
        """Return a template's build and hold its entries until `stack` closes, so that no other build removes them.

        With a `size` that the driver cannot restore the template's snapshot with, it is the build of a snapshot of that
        size or, if there is none, a build without a snapshot.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, SandboxError: no machine can start.
        """
        for _ in range(HOLD_TRIES):
            built = await self._find(name)
            if size is not None and size != built.template.machine:
                built = await self._resized(built, size)
            try:
                stack.enter_context(hold(built.entries()))
            except FileNotFoundError:
                self._lookups.pop(name, None)
            else:
                return built
        raise TemplateNotBuilt(name)

    async def check(self, built: BuiltTemplate) -> None:
        """Find out whether a machine did not start because its build is damaged. Reads all files of the build.

        Raises:
            TemplateDamaged: files have changed since they were built.
        """
        with map_errors():
            damaged = await self._builder.damaged(built)
        if damaged:
            raise TemplateDamaged(built.template.name, ", ".join(entry.kind for entry in damaged))

    async def snapshot_of(self, template: Template) -> None:
        """Take a snapshot of a template whose size was changed, and remove the oldest of such snapshots.

        Raises:
            SandboxError: it could not be taken.
        """
        with map_errors():
            await self._builder.build(template, self._driver)
            own = find_template(self._catalogue, template.name)
            await self._builder.remove_resized(own, self._driver, keep=MAX_SIZES)

    async def _resized(self, built: BuiltTemplate, size: MachineSize) -> BuiltTemplate:
        template = built.template.resized(size)
        if not self._driver.capabilities.fixed_size:
            return replace(built, template=template)
        with map_errors():
            found = await self._builder.find(template, self._driver)
        return found or replace(built, template=template, snapshot=None)

    async def _find(self, name: str) -> BuiltTemplate:
        template, stamp = find_template(self._catalogue, name), self._builder.stamp()
        lookup = self._lookups.get(name)
        if lookup is None or not lookup.is_fresh(template, stamp):
            with map_errors():
                lookup = _Lookup(template, stamp, await self._builder.find(template, self._driver))
            self._lookups[name] = lookup
        if lookup.built is None:
            raise TemplateNotBuilt(name)
        return lookup.built
