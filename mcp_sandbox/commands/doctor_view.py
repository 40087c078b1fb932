"""`mcp-sandbox doctor`: print the report on this host, as text or JSON."""

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.doctor import MB, examine, one_line
from mcp_sandbox.commands.doctor_report import (
    ChoiceReport,
    DriverReport,
    NetworkReport,
    Report,
    ServerReport,
    TemplateReport,
    WebReport,
)
from mcp_sandbox.config import Settings
from mcp_sandbox.machines.provider import CPUS, LEVELS
from mcp_sandbox.serving.lifetime import run_command
from vmm.types import Isolation, NetworkMode

GB = 1000 * MB
_BUILT = {True: "[green]yes[/]", False: "no", None: "unknown"}

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main(settings: Settings, *, as_json: bool, ask_web: bool = False) -> int:
    """Examine this host, print the report and return an exit code."""

    async def examined() -> int:
        with err.status("examining this host"):
            report = await examine(settings, ask_web=ask_web)
        if as_json:
            sys.stdout.write(report.model_dump_json(indent=2) + "\n")
        else:
            show(report)
        return 0 if report.ready else 1

    return report_errors(lambda: run_command(examined))


def show(report: Report) -> None:
    """Print the whole report."""
    show_verdict(report, out)
    out.print()
    _show_choice(report.choice)
    for driver in report.drivers:
        _show_driver(driver)
    out.print()
    _show_host(report)
    _show_templates(report.templates)
    _show_web(report.web)
    if report.servers:
        _show_servers(report.servers)
    if report.missing:
        _show_missing(report)
    for warning in report.warnings:
        out.print(f"[yellow]![/] {escape(warning)}")


def show_verdict(report: Report, console: Console) -> None:
    """Print whether this host is ready, and the next step if it is not."""
    mark = "[green]✓[/]" if report.ready else "[red]✗[/]"
    console.print(f"{mark} [bold]{escape(report.verdict)}[/]")
    if report.next_step:
        console.print(f"  Next step: {escape(report.next_step)}")


def _show_choice(choice: ChoiceReport) -> None:
    grid = _section(f"Selected driver: {choice.driver}")
    grid.add_row("", "setting", escape(choice.setting))
    grid.add_row("", "min_isolation", choice.min_isolation)
    for number, reason in enumerate(choice.reasons):
        grid.add_row("", "" if number else "reason", escape(one_line(reason)))
    if choice.better:
        grid.add_row("", "to improve", escape(choice.better))
    out.print(grid)


def _show_driver(driver: DriverReport) -> None:
    grid = _section(driver.name)
    grid.add_row("", "usable", ("[green]yes[/]" if driver.usable else "[red]no[/]") + ", selected" * driver.in_force)
    if driver.isolation:
        grid.add_row("", "isolation", f"{driver.isolation}: {LEVELS[driver.isolation]}")
    if driver.usable:
        grid.add_row("", "CPU", CPUS[driver.accel])
    if driver.version:
        grid.add_row("", "version", escape(driver.version))
    if driver.program:
        grid.add_row("", "program", escape(str(driver.program)))
    if driver.features:
        grid.add_row("", "features", escape(", ".join(driver.features)))
    grid.add_row("", "reason", escape(one_line(driver.reason)))
    if driver.fix:
        grid.add_row("", "to improve" if driver.usable else "to fix", escape(driver.fix))
    for protection in driver.missing_protections:
        grid.add_row("", "[yellow]weakness[/]", escape(protection))
    out.print(grid)


def _section(title: str) -> Table:
    """Print a title and return a grid of names and values for the lines below it."""
    out.print(f"[bold]{escape(title)}[/]")
    names = Column(style="dim", no_wrap=True, min_width=len("min_isolation"))
    return Table.grid(Column(), names, Column(overflow="fold"), padding=(0, 2))


def _show_host(report: Report) -> None:
    host, home = report.host, report.home
    grid = Table.grid(Column(style="dim"), Column(overflow="fold"), padding=(0, 2))
    grid.add_row("user", escape(host.user) + (" (root)" if host.root and host.user != "root" else ""))
    grid.add_row("CPUs", str(host.cpus))
    grid.add_row("memory", f"{host.memory_available_bytes / GB:.1f} GB available of {host.memory_bytes / GB:.1f} GB")
    grid.add_row("limits", escape(host.cgroup))
    grid.add_row("network", escape(_network(report.network)))
    for path in report.settings:
        grid.add_row("settings", escape(str(path)))
    grid.add_row("home", escape(str(home.path)))
    grid.add_row("", f"{home.used_bytes / GB:.1f} GB used, {home.free_bytes / GB:.1f} GB free")
    if any(driver.in_force and driver.isolation is Isolation.VM for driver in report.drivers):
        grid.add_row("guest kernel", "fetched" if report.guest_kernel else "not fetched: run mcp-sandbox setup")
    out.print(grid)
    out.print()


def _network(network: NetworkReport) -> str:
    """Return what sandboxes can reach."""
    if network.modes == [NetworkMode.NONE]:
        return "sandboxes are offline; network.allow_domains would let them ask for mode proxy"
    domains = ", ".join(network.allow_domains)
    described = {NetworkMode.NONE: "none", NetworkMode.PROXY: f"proxy (to {domains})", NetworkMode.NAT: "nat"}
    return f"sandboxes can ask for: {'; '.join(described[mode] for mode in network.modes)}"


def _show_templates(templates: list[TemplateReport]) -> None:
    columns = (Column("template", no_wrap=True), "built", "image", "snapshot", "total")
    table = Table(*columns, title="Templates")
    for template in templates:
        name = f"[bold]{template.name}[/]" if template.default else template.name
        sizes = (template.image_bytes, template.snapshot_bytes, template.stored_bytes)
        table.add_row(name, _BUILT[template.built], *("" if size is None else f"{size / MB:.0f} MB" for size in sizes))
    out.print(table)


def _show_web(web: WebReport) -> None:
    grid = _section("Web search")
    for provider in web.providers:
        state = {True: "[green]answers[/]", False: f"[red]{escape(provider.problem or '')}[/]", None: "not asked"}
        grid.add_row("", provider.name, state[provider.answers])
    if web.problem:
        grid.add_row("", "[red]problem[/]", escape(web.problem))
    elif not web.providers:
        grid.add_row("", "to fix", "set web.searxng_url or an API key such as web.brave_key")
    elif all(provider.answers is None for provider in web.providers):
        grid.add_row("", "to check", "mcp-sandbox doctor --web")
    out.print(grid)
    out.print()


def _show_servers(servers: list[ServerReport]) -> None:
    columns = ("server", "up", "sandboxes", "pool of", "ready", "starting", "hits", "misses", "failed")
    table = Table(*columns, title="Running servers of this home")
    for server in servers:
        cells = (str(server.pid), f"{server.uptime_s:.0f} s", str(server.sandboxes))
        for pool in server.pools:
            numbers = (pool.ready, pool.starting, pool.hits, pool.misses, pool.failed)
            table.add_row(*cells, escape(pool.template), *map(str, numbers))
            cells = ("", "", "")
        if any(cells):
            table.add_row(*cells)
    out.print(table)
    for error in {pool.last_error for server in servers for pool in server.pools if pool.last_error}:
        out.print(f"[yellow]![/] a pool could not start a machine: {escape(one_line(error))}")


def _show_missing(report: Report) -> None:
    table = Table(Column("missing", no_wrap=True), "Debian package", "purpose", title="Missing on this host")
    for need in report.missing:
        table.add_row(need.what, need.package or "", need.purpose)
    out.print(table)
    out.print("  `mcp-sandbox setup` installs it, or prints the command for an administrator.")
