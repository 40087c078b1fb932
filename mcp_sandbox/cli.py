"""The command line. Without a command it is an MCP server on stdio.

Every command imports what it needs when it runs: loading all of it takes more than a second.
"""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from mcp_sandbox.config import Settings

EXIT_USAGE = 2

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
template_app = typer.Typer(no_args_is_help=True, help="Build and manage what sandboxes are made from.")
app.add_typer(template_app, name="template")
sandbox_app = typer.Typer(no_args_is_help=True, help="See and close the sandboxes of running servers.")
app.add_typer(sandbox_app, name="sandbox")

# As in templates.model, which takes long to load.
Language = Literal["python", "cpp", "go", "shell"]
Source = Literal["debian", "oci", "dockerfile"]

TemplateName = Annotated[str | None, typer.Argument(help="Name of a template; the default one if left out.")]


def fail(message: str, code: int = 1) -> NoReturn:
    """Tell people what is wrong, on stderr, and end."""
    typer.echo(f"mcp-sandbox: {message}", err=True)
    raise typer.Exit(code)


def settings_of(ctx: typer.Context) -> "Settings":
    """The settings in force for this command line."""
    from mcp_sandbox.config import ConfigError, load_settings

    try:
        return load_settings(**ctx.find_root().obj)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("mcp-sandbox"))
        raise typer.Exit


@app.callback(help="Sandboxes for AI agents. Without a command: an MCP server on stdin and stdout.")
def main(
    ctx: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Where images, snapshots and machines are kept.")] = None,
    driver: Annotated[str | None, typer.Option(help="How machines run: auto, or a driver's name.")] = None,
    min_isolation: Annotated[
        str | None, typer.Option(help="Use nothing that isolates less: vm, kernel or namespace.")
    ] = None,
    accel: Annotated[str | None, typer.Option(help="auto, kvm or tcg.")] = None,
    template_path: Annotated[
        list[Path] | None, typer.Option(help="A directory with templates of your own; can be given several times.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR, on stderr.")] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    ctx.obj = {
        "home": home,
        "driver": driver,
        "min_isolation": min_isolation,
        "accel": accel,
        "template_path": tuple(template_path) if template_path else None,
        "log": {"level": log_level} if log_level else None,
    }
    if ctx.invoked_subcommand is None:
        _serve_stdio(settings_of(ctx))


def _serve_stdio(settings: "Settings") -> None:
    from mcp_sandbox.commands.common import guarded
    from mcp_sandbox.serving.server import run_stdio

    def serve() -> int:
        run_stdio(settings)
        return 0

    raise typer.Exit(guarded(serve))


@app.command()
def run(
    ctx: typer.Context,
    file: Annotated[typer.FileText, typer.Argument(help="Source file, or - for stdin.")],
    template: Annotated[
        str | None, typer.Option(help="What the sandbox is made from; else the file's name says it: .py, .cpp, .go.")
    ] = None,
    stdin: Annotated[
        typer.FileText | None, typer.Option(help="File that the code reads from its standard input.")
    ] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds the run may take.")] = None,
    save: Annotated[Path | None, typer.Option(help="Directory to put the run's artifacts into.")] = None,
) -> None:
    """Run a file in a fresh sandbox and destroy it."""
    from mcp_sandbox.commands.run import Source, run_once, template_for

    source = Source(file.read(), template or template_for(file.name), stdin.read() if stdin else None)
    raise typer.Exit(run_once(settings_of(ctx), source, timeout_s, save))


@app.command()
def setup(
    ctx: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="Only say what is missing.")] = False,
    driver: Annotated[str | None, typer.Option(help="Set up this driver, not the one in force.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Also for templates made from OCI images and Dockerfiles.")
    ] = False,
) -> None:
    """Get what the driver in force needs: system packages, and a guest kernel or gVisor."""
    from mcp_sandbox.commands import setup as setup_cli

    ctx.find_root().obj |= {"driver": driver} if driver else {}
    raise typer.Exit(setup_cli.main(settings_of(ctx), check=check, images=images))


@app.command()
def doctor(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether this host can run sandboxes, how well, and what to do if not."""
    from mcp_sandbox.commands import doctor_view

    raise typer.Exit(doctor_view.main(settings_of(ctx), as_json=as_json))


@app.command()
def demo(ctx: typer.Context) -> None:
    """Show the product at work: a short tour through a real MCP client."""
    from mcp_sandbox.commands import demo as demo_cli

    raise typer.Exit(demo_cli.main(settings_of(ctx)))


@app.command()
def bench(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="restore, calls, cpu, compile, pool, fork, soak; all but soak if left out."),
    ] = None,
    driver: Annotated[str | None, typer.Option(help="Measure this driver only, not all that work here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
    soak: Annotated[bool, typer.Option("--soak", help="Also the soak, which takes many minutes.")] = False,
    cycles: Annotated[int | None, typer.Option(min=1, help="Sandboxes of a soak; else as many as promised.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure on this host the numbers that docs/specification.md promises."""
    from mcp_sandbox.commands.bench import command

    ctx.find_root().obj |= {"driver": driver} if driver else {}
    settings = settings_of(ctx)
    raise typer.Exit(command.main(settings, names or (), quick=quick, with_soak=soak, cycles=cycles, as_json=as_json))


@template_app.command("init")
def template_init(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the new template.")],
    language: Annotated[
        Language | None, typer.Option(help="What run_code takes; if left out, python for Debian and shell for images.")
    ] = None,
    source: Annotated[Source, typer.Option(help="Where the files come from.")] = "debian",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Put it there, not into the first directory of the search path.")
    ] = None,
) -> None:
    """Begin a template of your own: a template.toml with comments, which can be built as it is."""
    from mcp_sandbox.commands import template_init as begin

    raise typer.Exit(begin.init(settings_of(ctx), name, language, source, directory))


@template_app.command("build")
def template_build(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Names of templates; the default one if left out.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Build all templates there are.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Build again whenever one of them changes.")] = False,
) -> None:
    """Build templates: files, guest kernel and snapshot. What did not change is not made again."""
    from mcp_sandbox.commands import template_build as building

    raise typer.Exit(building.build(settings_of(ctx), names or (), every=every, watch=watch))


@template_app.command("update")
def template_update(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Names of templates; the default one if left out.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Update all templates.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be updated.")] = False,
) -> None:
    """Bring newer Debian packages, guest kernels and gVisor releases into built templates."""
    from mcp_sandbox.commands import template_update as updating

    raise typer.Exit(updating.update(settings_of(ctx), names or (), every=every, dry_run=dry_run))


@template_app.command("list")
def template_list(ctx: typer.Context) -> None:
    """List all templates and what is built of them."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.show_all(settings_of(ctx)))


@template_app.command("show")
def template_show(ctx: typer.Context, name: TemplateName = None) -> None:
    """Show one template and everything the store holds for it."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.show(settings_of(ctx), name))


@template_app.command("remove")
def template_remove(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Name of a template.")]) -> None:
    """Remove what was built of a template. Its definition stays, and so does what sandboxes use."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.remove(settings_of(ctx), name))


@template_app.command("prune")
def template_prune(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also what templates are made from now.")] = False,
) -> None:
    """Remove what no template is made from any more. What sandboxes and servers use stays."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.prune(settings_of(ctx), dry_run=dry_run, every=every))


@sandbox_app.command("list")
def sandbox_list(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the sandboxes of all servers that use this home, and what killed ones have left."""
    from mcp_sandbox.commands import sandbox

    raise typer.Exit(sandbox.show(settings_of(ctx), as_json=as_json))


@sandbox_app.command("close")
def sandbox_close(ctx: typer.Context, sandbox_id: Annotated[str, typer.Argument(help="Id of a sandbox.")]) -> None:
    """Close a sandbox, whoever owns it. Its variables and files are gone."""
    from mcp_sandbox.commands import sandbox

    raise typer.Exit(sandbox.close(settings_of(ctx), sandbox_id))


@app.command()
def metrics(ctx: typer.Context) -> None:
    """Print the metrics of all servers that use this home, in Prometheus' text format."""
    from mcp_sandbox.commands import sandbox

    raise typer.Exit(sandbox.print_metrics(settings_of(ctx)))
