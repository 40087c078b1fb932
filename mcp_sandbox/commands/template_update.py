"""`mcp-sandbox template update`: rebuild templates when the archive has newer packages."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.markup import escape

from mcp_sandbox.app import Drivers, make_builder
from mcp_sandbox.commands.common import EXIT_ERROR, EXPECTED_ERRORS, print_error, report_errors
from mcp_sandbox.commands.template import usable_drivers
from mcp_sandbox.commands.template_build import BuildView
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command
from templates.errors import BuildFailed
from templates.locks import hold
from templates.model import Template
from templates.tools import LoggedTools, StepFailed, tail
from templates.update import Update, find_updates

LOG = "update.log"

err = Console(stderr=True, highlight=False)


def update(settings: Settings, names: Sequence[str], *, every: bool, dry_run: bool) -> int:
    """Update the named templates, all, or the default one, and every other template that shares a base with them.

    Sandboxes start from the previous builds until all new ones are complete, and after that if one of them fails.
    """

    async def main() -> int:
        catalogue = settings.catalogue
        wanted = [catalogue.load(name) for name in names or (settings.template,)]
        if every:
            wanted = list(catalogue.templates().values())
        with err.status("looking for newer packages") as status:
            view = BuildView(status)
            updates = await _find(settings, wanted, view)
            _print(updates, wanted)
            if dry_run or not updates:
                return 0
            return await _rebuild(settings, {update.key: update.revision for update in updates}, view)

    return report_errors(lambda: run_command(main))


async def _find(settings: Settings, templates: Sequence[Template], view: BuildView) -> list[Update]:
    store, builder = make_builder(settings)
    log = store.logs / LOG
    tools = LoggedTools(log, lambda line: view.status.update(f"looking for newer packages · {escape(line[-80:])}"))
    async with store.scratch("update") as work:
        try:
            return await find_updates(store, builder.inventory, templates, tools, work)
        except StepFailed as error:
            raise BuildFailed("update", str(error), log_tail=tail(log), log_path=log) from error


def _print(updates: Sequence[Update], templates: Sequence[Template]) -> None:
    for update in updates:
        reason = "newer packages:" if update.upgrades else "its packages are no longer stored, so it is made again"
        err.print(f"[yellow]![/] {escape(update.part)}: {reason}", soft_wrap=True)
        for upgrade in update.upgrades:
            err.print(escape(f"  {upgrade.package} {upgrade.old or '(new)'} → {upgrade.new}"), soft_wrap=True)
    for template in templates:
        if template.source.dockerfile:
            err.print(
                f"[yellow]![/] {template.name}: the images that its Dockerfile names are not checked. To fetch them "
                f"again: `mcp-sandbox template remove {template.name}`, then `template build {template.name}`.",
                soft_wrap=True,
            )
    if not updates:
        err.print("[green]✓[/] Everything is up to date.")


async def _rebuild(settings: Settings, pending: Mapping[str, str], view: BuildView) -> int:
    """Rebuild with the new revisions what is built with the current ones, then make the new ones current."""
    async with Drivers(settings, view.report, pending) as new:
        try:
            built = await _build_new(settings, new, view)
        except EXPECTED_ERRORS as error:
            print_error(error)
            err.print("[red]✗[/] Nothing was updated: sandboxes still start from the previous builds.")
            return EXIT_ERROR
        for template, driver in built:
            for entry in await new.builder.outdated(template, new.load(driver)):
                await new.store.remove(entry.kind, entry.key)
    for name in dict.fromkeys(template.name for template, _ in built):
        err.print(f"Template [bold]{name}[/] is updated.")
    return 0


async def _build_new(settings: Settings, new: Drivers, view: BuildView) -> list[tuple[Template, str]]:
    """Build and switch to the new revisions; return the rebuilt templates with the names of their drivers."""
    rebuilt = []
    # Hold the new entries: to a build in another process they are unused until the revisions are saved.
    async with Drivers(settings) as old:
        with ExitStack() as held:
            for driver in await usable_drivers(old):
                templates = settings.catalogue.templates().values()
                built = [template for template in templates if await old.builder.find(template, driver)]
                if built:
                    await new.fetch_and_probe(driver.name)
                for template in built:
                    if await new.builder.find(template, new.load(driver.name)) is not None:
                        continue
                    view.begin()
                    err.print(f"Rebuilding [bold]{template.name}[/] for {driver.name}")
                    result = await new.builder.build(template, new.load(driver.name))
                    held.enter_context(hold(result.entries()))
                    rebuilt.append((template, driver.name))
            new.builder.inventory.revisions.save()
    return rebuilt
