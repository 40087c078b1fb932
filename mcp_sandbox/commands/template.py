"""`mcp-sandbox template list`, `show`, `remove` and `prune`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.app import Drivers, make_builder, open_host
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command
from templates.catalogue import CatalogueEntry
from templates.errors import TemplateError
from templates.locks import is_held
from templates.store import Entry, Store
from vmm.driver import DRIVERS, Driver
from vmm.errors import VmmError

MB = 1_000_000

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_all(settings: Settings) -> int:
    """Print a table of all templates, and the errors of those that have some."""

    async def main() -> int:
        table = Table(
            Column("template", no_wrap=True), "title", "memory", "ready", "on disk", Column("from", overflow="fold")
        )
        listed = list(settings.catalogue.entries())
        async with open_host(settings) as host:
            for entry in listed:
                place = "built in" if entry.built_in else escape(str(entry.folder.parent))
                if entry.template is None:
                    table.add_row(escape(entry.name), "[red]has errors[/]", "", "no", "", place)
                    continue
                ready = host.facts is not None and await host.builder.find(entry.template, host.driver) is not None
                size = sum(stored.size_bytes for stored in host.builder.entries_of(entry.template))
                memory = f"{entry.template.machine.memory_mb} MB"
                title = escape(entry.template.title)
                table.add_row(entry.name, title, memory, "yes" if ready else "no", f"{size / MB:.0f} MB", place)
        out.print(table)
        for entry in listed:
            _print_notes(entry)
        err.print("Build a template with `mcp-sandbox template build NAME`; start a new one with `template init NAME`.")
        return 0

    return report_errors(lambda: run_command(main))


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
        if dry_run:
            states = {entry.path: "in use" if is_held(entry.path) else "would be removed" for entry in unused}
            _print_entries(unused, states)
            return 0
        await _remove(drivers.store, unused)
        drivers.store.tidy()
        return 0

    return report_errors(lambda: run_command(main))


async def usable_drivers(drivers: Drivers) -> list[Driver]:
    """Return the usable drivers."""
    found = []
    for name in DRIVERS:
        try:
            if (await drivers.ask(name)).usable:
                found.append(drivers.load(name))
        except (VmmError, TemplateError, OSError):  # `doctor` shows why
            continue
    return found


async def _remove(store: Store, entries: Sequence[Entry]) -> None:
    """Remove entries, and print which were removed and which are in use."""
    states = {entry.path: await store.remove(entry.kind, entry.key) for entry in entries}
    if entries:
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
