"""`mcp-sandbox template …`: build, list, show and remove, for people."""

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.app import make_builder, open_host
from mcp_sandbox.commands.common import guarded
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady
from mcp_sandbox.serving.lifetime import run_command
from templates.build import Builder, Progress
from templates.model import Template, find_templates, load_template
from templates.store import Entry

MB = 1_000_000

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def build(settings: Settings, name: str | None) -> int:
    """Build a template and show how it goes."""

    async def main() -> int:
        template = load_template(name or settings.template)
        with err.status("looking at this host") as status:
            told: set[str] = set()

            def report(progress: Progress) -> None:
                if progress.state in ("done", "ready"):
                    if progress.step in told:  # fetched for the driver, and found again by the build
                        return
                    told.add(progress.step)
                    how = "made before" if progress.state == "ready" else f"{progress.elapsed_s:.1f} s"
                    err.print(f"[green]✓[/] {progress.step} ({how})")
                else:
                    status.update(f"{progress.step} · {progress.elapsed_s:.0f} s · {escape(progress.message[-80:])}")

            async with open_host(settings, report, fetch=True) as host:
                verdict = host.choice.verdict
                if not verdict.usable:
                    raise HostNotReady(verdict.reason, verdict.fix)
                err.print(f"[green]✓[/] driver {host.driver.name} ({host.driver.capabilities.isolation} isolation)")
                await host.builder.build(template, host.driver)
                for entry in await host.builder.outdated(template, host.driver):
                    await host.store.remove(entry.kind, entry.key)
                for note in host.builder.notes_of(template):
                    err.print(f"[yellow]![/] {escape(note)}")
        err.print(f"Template [bold]{template.name}[/] is ready.")
        return 0

    return guarded(lambda: run_command(main))


def show_all(settings: Settings) -> int:
    """A table of all templates."""

    async def main() -> int:
        table = Table(Column("template", no_wrap=True), "title", "memory", "ready", "on disk")
        async with open_host(settings) as host:
            for template in find_templates().values():
                ready = host.facts is not None and await host.builder.find(template, host.driver) is not None
                size = sum(entry.size_bytes for entry in host.builder.entries_of(template))
                table.add_row(
                    template.name,
                    escape(template.title),
                    f"{template.machine.memory_mb} MB",
                    "yes" if ready else "no",
                    f"{size / MB:.0f} MB",
                )
        out.print(table)
        err.print("`mcp-sandbox template build NAME` makes one ready.")
        return 0

    return guarded(lambda: run_command(main))


def show(settings: Settings, name: str | None) -> int:
    """One template in detail."""

    def main() -> int:
        template = load_template(name or settings.template)
        _, builder = make_builder(settings)
        out.print_json(template.model_dump_json())
        _print_entries(builder, template)
        for note in builder.notes_of(template):
            out.print(escape(note))
        return 0

    return guarded(main)


def remove(settings: Settings, name: str) -> int:
    """Remove everything built for one template alone."""

    async def main() -> int:
        store, builder = make_builder(settings)
        entries = builder.entries_of(load_template(name))
        for entry in entries:
            await store.remove(entry.kind, entry.key)
        err.print(f"Removed {_total(entries)} of {name}.")
        return 0

    return guarded(lambda: run_command(main))


def _print_entries(builder: Builder, template: Template) -> None:
    table = Table("kind", "key", "made", "on disk")
    entries = builder.entries_of(template)
    for entry in entries:
        table.add_row(entry.kind, entry.key, f"{entry.made:%Y-%m-%d %H:%M}", f"{entry.size_bytes / MB:.0f} MB")
    out.print(table)
    for digest in dict.fromkeys(entry.details["digest"] for entry in entries if "digest" in entry.details):
        out.print(f"{template.source.oci} was {digest} when it was fetched.", soft_wrap=True)


def _total(entries: list[Entry]) -> str:
    return f"{len(entries)} entries, {sum(entry.size_bytes for entry in entries) / MB:.0f} MB,"
