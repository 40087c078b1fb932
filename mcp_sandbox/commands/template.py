"""`mcp-sandbox template list`, `show`, `remove` and `prune`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.app import Drivers, Host, make_builder, open_host
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import TemplateView
from templates.catalogue import CatalogueEntry
from templates.errors import TemplateError
from templates.locks import is_held
from templates.store import Entry, Store
from vmm.driver import DRIVERS, Driver
from vmm.errors import VmmError

MB = 1_000_000
NOTHING = "Nothing to remove."

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_all(settings: Settings, *, as_json: bool) -> int:
    """Print a table of all templates, and the errors of those that have some; or all of it as JSON."""

    async def main() -> int:
        listed = list(settings.catalogue.entries())
        async with open_host(settings) as host:
            views = [await _view(host, entry) for entry in listed]
        if as_json:
            sys.stdout.write(json.dumps([view.model_dump(mode="json") for view in views], indent=2) + "\n")
            return 0
        _print_templates(views)
        for entry in listed:
            _print_notes(entry)
        err.print("Build a template with `mcp-sandbox template build NAME`; start a new one with `template init NAME`.")
        return 0

    return report_errors(lambda: run_command(main))


async def _view(host: Host, entry: CatalogueEntry) -> TemplateView:
    folder, template = None if entry.built_in else str(entry.folder), entry.template
    if template is None:
        return TemplateView(name=entry.name, folder=folder, built=False, problem=str(entry.error))
    return TemplateView(
        name=entry.name,
        folder=folder,
        title=template.title,
        description=template.description,
        language=template.language,
        memory_mb=template.machine.memory_mb,
        vcpus=template.machine.vcpus,
        disk_mb=template.machine.disk_mb,
        packages=list(template.packages),
        built=host.facts is not None and await host.builder.find(template, host.driver) is not None,
        build_bytes=sum(stored.size_bytes for stored in host.builder.entries_of(template)),
    )


def _print_templates(views: Sequence[TemplateView]) -> None:
    table = Table(
        Column("template", no_wrap=True), "title", "memory", "ready", "on disk", Column("from", overflow="fold")
    )
    for view in views:
        title = "[red]has errors[/]" if view.problem else escape(view.title or "")
        memory = "" if view.memory_mb is None else f"{view.memory_mb} MB"
        size = "" if view.build_bytes is None else f"{view.build_bytes / MB:.0f} MB"
        place = escape(str(Path(view.folder).parent)) if view.folder else "built in"
        table.add_row(escape(view.name), title, memory, "yes" if view.built else "no", size, place)
    out.print(table)


def show(settings: Settings, name: str | None) -> int:
    """Print one template in detail."""

    def main() -> int:
        wanted = name or settings.template
        template = settings.catalogue.load(wanted)
        _, builder = make_builder(settings)
        out.print(f"[bold]{template.name}[/] from {escape(str(template.folder))}", soft_wrap=True)
        for listed in settings.catalogue.entries():
            if listed.name == wanted:
                _print_notes(listed)
        out.print_json(template.model_dump_json(exclude_none=True))
        entries = builder.entries_of(template)
        _print_entries(entries)
        for entry in entries:
            if entry.kind == "layers" and "digest" in entry.details:
                image, digest = escape(entry.inputs["image"]), entry.details["digest"]
                out.print(f"{image} was fetched as {digest}.", soft_wrap=True)
        for note in builder.image_notes(template):
            out.print(f"[yellow]![/] {escape(note)}", soft_wrap=True)
        return 0

    return report_errors(main)


def remove(settings: Settings, name: str) -> int:
    """Remove a template's builds, except entries that other templates use. Its definition stays."""

    async def main() -> int:
        store, builder = make_builder(settings)
        await _remove(store, builder.exclusive_entries_of(settings.catalogue.load(name)))
        return 0

    return report_errors(lambda: run_command(main))


def prune(settings: Settings, *, dry_run: bool, every: bool) -> int:
    """Remove entries that no template uses, or with `every` all entries, and leftovers of failed builds."""

    async def main() -> int:
        async with Drivers(settings) as drivers:
            unused = drivers.store.entries()
            if not every:
                unused = await drivers.builder.unused(await usable_drivers(drivers))
        if not dry_run:
            await _remove(drivers.store, unused)
            drivers.store.tidy()
        elif unused:
            states = {entry.path: "in use" if is_held(entry.path) else "would be removed" for entry in unused}
            _print_entries(unused, states)
        else:
            err.print(NOTHING)
        return 0

    return report_errors(lambda: run_command(main))


async def usable_drivers(drivers: Drivers) -> list[Driver]:
    """Return the usable drivers."""
    found = []
    for name in DRIVERS:
        try:
            if (await drivers.probe(name)).usable:
                found.append(drivers.load(name))
        except (VmmError, TemplateError, OSError):  # `doctor` shows why
            continue
    return found


async def _remove(store: Store, entries: Sequence[Entry]) -> None:
    """Remove entries, and print which were removed and which are in use."""
    if not entries:
        err.print(NOTHING)
        return
    states = {entry.path: await store.remove(entry.kind, entry.key) for entry in entries}
    _print_entries(entries, states)
    removed = [entry for entry in entries if states[entry.path] == "removed"]
    in_use = sum(state == "in use" for state in states.values())
    kept = f" Kept {in_use} that sandboxes or servers use." if in_use else ""
    err.print(f"Removed {len(removed)} of {len(entries)} entries, {_size(removed)}.{kept}")


def _print_notes(entry: CatalogueEntry) -> None:
    for folder in entry.hides:
        err.print(
            f"[yellow]![/] {escape(entry.name)} hides the one in {escape(str(folder.parent))}",
            soft_wrap=True,
        )
    if entry.error:
        err.print(f"[red]✗[/] {escape(entry.name)} has errors:\n{escape(str(entry.error))}", soft_wrap=True)


def _print_entries(entries: Sequence[Entry], states: Mapping[Path, str] | None = None) -> None:
    """Print a table of entries, with their keys or with what happens to them."""
    last = "state" if states else "key"
    table = Table("kind", "template", "made", "on disk", Column(last, no_wrap=True))
    for entry in entries:
        template = " for ".join(str(entry.details[word]) for word in ("template", "driver") if entry.details.get(word))
        made, size = f"{entry.made:%Y-%m-%d %H:%M}", f"{entry.size_bytes / MB:.0f} MB"
        table.add_row(entry.kind, escape(template), made, size, states[entry.path] if states else entry.key)
    out.print(table)


def _size(entries: Sequence[Entry]) -> str:
    return f"{sum(entry.size_bytes for entry in entries) / MB:.0f} MB"
