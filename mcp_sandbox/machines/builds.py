"""What is built of the templates there are, looked up anew whenever a build has changed it."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from mcp_sandbox.errors import TemplateNotBuilt
from mcp_sandbox.machines.mapping import mapped
from mcp_sandbox.machines.provider import find_template
from templates.build import Builder, BuiltTemplate
from templates.catalogue import Catalogue
from templates.holding import held
from templates.model import Template
from vmm.driver import Driver

HOLD_TRIES = 3  # a build that replaces another one removes it in the next moment


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found of a template, and how the store was then."""

    template: Template
    stamp: tuple[int, ...]
    built: BuiltTemplate | None

    def holds(self, template: Template, stamp: tuple[int, ...]) -> bool:
        """Whether looking again would find the same."""
        return self.template == template and self.stamp == stamp and (self.built is None or self.built.is_there())


class Builds:
    """Builds for one driver."""

    def __init__(self, driver: Driver, builder: Builder, catalogue: Catalogue) -> None:
        self._driver = driver
        self._builder = builder
        self._catalogue = catalogue
        self._known: dict[str, _Known] = {}  # looking one up hashes files: too slow for every restore

    def templates(self) -> Mapping[str, Template]:
        """All templates of the catalogue that can be read."""
        return self._catalogue.templates()

    async def version(self, template: str) -> str:
        """Which making of a template the next machine would be of.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, SandboxError: there would be no machine.
        """
        return (await self._find(template)).version

    async def hold(self, name: str, stack: ExitStack) -> BuiltTemplate:
        """What is built of a template, with a hold on it: a build could remove it before the machine has started.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, SandboxError: there is nothing to start from.
        """
        for _ in range(HOLD_TRIES):
            built = await self._find(name)
            try:
                stack.enter_context(held(built.entries()))
            except FileNotFoundError:
                self._known.pop(name, None)
            else:
                return built
        raise TemplateNotBuilt(name)

    async def _find(self, name: str) -> BuiltTemplate:
        template, stamp = find_template(self._catalogue, name), self._builder.stamp()
        known = self._known.get(name)
        if known is None or not known.holds(template, stamp):
            with mapped():
                known = _Known(template, stamp, await self._builder.find(template, self._driver))
            self._known[name] = known
        if known.built is None:
            raise TemplateNotBuilt(name)
        return known.built
