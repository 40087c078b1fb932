"""`mcp-sandbox template build`: build templates, once or whenever they change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from mcp_sandbox.app import Host, open_host
from mcp_sandbox.commands.common import EXIT_ERROR, EXPECTED_ERRORS, print_error, report_errors
from mcp_sandbox.commands.template_watch import Watch
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady
from mcp_sandbox.serving.lifetime import run_command
from templates.build import Progress
from templates.errors import EntryInUse
from templates.model import Template
from vmm.driver import Driver

err = Console(stderr=True, highlight=False)


@dataclass(slots=True)
class BuildView:
    """Shows the steps of a build, each once for each template."""

    status: Status
    fetched: frozenset[str] | None = None  # steps that the driver needed; builds would report them again
    shown: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Start the next template."""
        if self.fetched is None:
            self.fetched = frozenset(self.shown)
        self.shown = set(self.fetched)

    def report(self, progress: Progress) -> None:
        if progress.state not in ("done", "ready"):
            message = escape(progress.message[-80:])
            self.status.update(f"{progress.step} · {progress.elapsed_s:.0f} s · {message}")
        elif progress.step not in self.shown:
            self.shown.add(progress.step)
            how = "already built" if progress.state == "ready" else f"{progress.elapsed_s:.1f} s"
            err.print(f"[green]✓[/] {progress.step} ({how})")


def build(settings: Settings, names: Sequence[str], *, every: bool, watch: bool) -> int:
    """Build the named templates, all, or the default one, and show progress."""
    catalogue = settings.catalogue

    async def main() -> int:
        wanted = catalogue.names() if every else list(dict.fromkeys(names)) or [settings.template]
        if not every:
            for name in wanted:
                catalogue.load(name)  # report a wrong name before probing the host
        changes = Watch(catalogue, None if every else wanted)
        with err.status("probing this host") as status:
            view = BuildView(status)
            async with open_host(settings, view.report, fetch=True) as host:
                if not host.choice.verdict.usable:
                    raise HostNotReady(host.choice.verdict.reason, host.choice.verdict.fix)
                err.print(f"[green]✓[/] driver {host.driver.name} ({host.driver.capabilities.isolation} isolation)")
                built = [await _build(host, name, view) for name in wanted]
                while watch:
                    status.update("waiting for changes; stop with Ctrl-C")
                    for name in await changes.next():
                        await _build(host, name, view)
        return 0 if all(built) else EXIT_ERROR

    return report_errors(lambda: run_command(main))


async def _build(host: Host, name: str, view: BuildView) -> bool:
    """Build one template and report errors, so that the others are still built."""
    view.begin()
    try:
        template = host.settings.catalogue.load(name)
        await _remove_damaged(host, template)
        await host.builder.build(template, host.driver)
        for entry in await host.builder.outdated(template, host.driver):
            await host.store.remove(entry.kind, entry.key)
    except EXPECTED_ERRORS as error:
        print_error(error)
        err.print(f"[red]✗[/] Template [bold]{name}[/] was not built.")
        return False
    for note in (*host.builder.image_notes(template), *driver_notes(template, host.driver)):
        err.print(f"[yellow]![/] {escape(note)}", soft_wrap=True)
    err.print(f"Template [bold]{name}[/] is ready.")
    return True


def driver_notes(template: Template, driver: Driver) -> list[str]:
    """Return which of a template's settings have no effect with a driver."""
    if template.machine.limits_disks and not driver.capabilities.disk_rate:
        return [f"driver {driver.name} keeps files in memory: disk_mb_per_s and disk_iops have no effect"]
    return []


async def _remove_damaged(host: Host, template: Template) -> None:
    """Remove the entries of an earlier build whose files have changed, so that they are made again."""
    built = await host.builder.find(template, host.driver)
    for entry in await host.builder.damaged(built) if built else ():
        err.print(f"[yellow]![/] {entry.kind} is damaged and will be made again")
        if await host.store.remove(entry.kind, entry.key) == "in use":
            raise EntryInUse(entry.kind)
