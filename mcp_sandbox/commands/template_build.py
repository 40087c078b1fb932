"""`mcp-sandbox template build`: one template or several, once or each time they change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from mcp_sandbox.app import Host, open_host
from mcp_sandbox.commands.common import EXIT_ERROR, EXPECTED, guarded, tell
from mcp_sandbox.commands.template_watch import Watch
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostNotReady
from mcp_sandbox.serving.lifetime import run_command
from templates.build import Progress

err = Console(stderr=True, highlight=False)


def build(settings: Settings, names: Sequence[str], *, every: bool, watch: bool) -> int:
    """Build templates and show how it goes: those named, all, or else the default one."""
    catalogue = settings.catalogue

    async def main() -> int:
        wanted = catalogue.names() if every else list(dict.fromkeys(names)) or [settings.template]
        if not every:
            for name in wanted:
                catalogue.load(name)  # a name that is wrong is told before anything is looked at
        changes = Watch(catalogue, None if every else wanted)
        with err.status("looking at this host") as status:
            show = _Show(status)
            async with open_host(settings, show.report, fetch=True) as host:
                if not host.choice.verdict.usable:
                    raise HostNotReady(host.choice.verdict.reason, host.choice.verdict.fix)
                err.print(f"[green]✓[/] driver {host.driver.name} ({host.driver.capabilities.isolation} isolation)")
                built = [await _build(host, name, show) for name in wanted]
                while watch:
                    status.update("waiting for changes; Ctrl-C ends this")
                    for name in await changes.next():
                        await _build(host, name, show)
        return 0 if all(built) else EXIT_ERROR

    return guarded(lambda: run_command(main))


async def _build(host: Host, name: str, show: "_Show") -> bool:
    """Build one template. What goes wrong is told, and does not keep the others from being built."""
    show.begin()
    try:
        template = host.settings.catalogue.load(name)
        await host.builder.build(template, host.driver)
        for entry in await host.builder.outdated(template, host.driver):
            await host.store.remove(entry.kind, entry.key)
    except EXPECTED as error:
        tell(error)
        err.print(f"[red]✗[/] Template [bold]{name}[/] is not ready.")
        return False
    for note in host.builder.notes_of(template):
        err.print(f"[yellow]![/] {escape(note)}", soft_wrap=True)
    err.print(f"Template [bold]{name}[/] is ready.")
    return True


@dataclass(slots=True)
class _Show:
    """Shows steps as they go by, each once for a template."""

    status: Status
    fetched: frozenset[str] | None = None  # what the driver needed; builds find it again
    told: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """The next template."""
        if self.fetched is None:
            self.fetched = frozenset(self.told)
        self.told = set(self.fetched)

    def report(self, progress: Progress) -> None:
        if progress.state not in ("done", "ready"):
            message = escape(progress.message[-80:])
            self.status.update(f"{progress.step} · {progress.elapsed_s:.0f} s · {message}")
        elif progress.step not in self.told:
            self.told.add(progress.step)
            how = "made before" if progress.state == "ready" else f"{progress.elapsed_s:.1f} s"
            err.print(f"[green]✓[/] {progress.step} ({how})")
