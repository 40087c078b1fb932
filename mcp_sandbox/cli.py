"""The command line. Without a command it runs an MCP server on stdio.

Each command imports its own modules when it runs: importing all of them takes more than a second.
"""

import gc
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from guest.languages import LanguageName
from mcp_sandbox import stdio_command
from mcp_sandbox.cli_base import Cpus, MemoryMb, settings_of
from mcp_sandbox.cli_sandbox import cp, logs, port, sandbox_app, shell
from mcp_sandbox.stdio_command import EXIT_USAGE, fail

app = typer.Typer(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
template_app = typer.Typer(no_args_is_help=True, help="Build and manage templates, which sandboxes start from.")
app.add_typer(template_app, name="template")
app.add_typer(sandbox_app, name="sandbox")
for command in (shell, port, cp, logs):
    app.command()(command)
web_app = typer.Typer(no_args_is_help=True, help="Search the web and fetch pages, as the web tools do.")
app.add_typer(web_app, name="web")
token_app = typer.Typer(no_args_is_help=True, help="Manage the tokens that open a shared server.")
app.add_typer(token_app, name="token")

MIN_TIMEOUT_S = 0.001  # 0 is not "without a limit"

# The same as in templates.model, which takes long to import.
Source = Literal["debian", "oci", "dockerfile"]
TimeRange = Literal["day", "week", "month", "year"]  # as in websearch.search
PageFormat = Literal["markdown", "text", "html", "raw"]

TemplateName = Annotated[str | None, typer.Argument(help="Template. Default: the `template` setting.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("mcp-sandbox"))
        raise typer.Exit


@app.callback(help="Sandboxes for AI agents. Without a command, run an MCP server on stdin and stdout.")
def main(
    ctx: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Directory of images, snapshots and running machines.")] = None,
    driver: Annotated[str | None, typer.Option(help="How machines run: auto, or the name of a driver.")] = None,
    min_isolation: Annotated[
        str | None, typer.Option(help="Refuse drivers that isolate less: vm, kernel or namespace.")
    ] = None,
    accel: Annotated[
        str | None, typer.Option(help="How a virtual machine's CPU runs: auto, kvm or tcg (emulated).")
    ] = None,
    template_path: Annotated[
        list[Path] | None, typer.Option(help="Directory of custom templates; may be repeated.")
    ] = None,
    toolsets: Annotated[
        str | None, typer.Option(help="Groups of tools to offer, separated by commas; advanced has all.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option(help="The only tools to offer, separated by commas, instead of toolsets.")
    ] = None,
    read_only: Annotated[bool | None, typer.Option("--read-only", help="Offer only tools that change nothing.")] = None,
    connect: Annotated[
        str | None, typer.Option(help="Address of a shared server to use instead of a server of its own.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least severe level logged on stderr: DEBUG, INFO, WARNING or ERROR.")
    ] = None,
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
        "toolsets": toolsets,
        "tools": tools,
        "read_only": read_only,
        "connect": connect,
        "log": {"level": log_level} if log_level else None,
    }
    if ctx.invoked_subcommand is None:
        raise typer.Exit(stdio_command.run(settings_of(ctx)))
    gc.enable()  # `start` disabled it


@app.command()
def run(
    ctx: typer.Context,
    file: Annotated[typer.FileText, typer.Argument(help="Source file; - reads it from stdin.")],
    template: Annotated[
        str | None, typer.Option(help="Template of the sandbox. Default: by the file's suffix, such as .py or .cpp.")
    ] = None,
    stdin: Annotated[typer.FileText | None, typer.Option(help="File to use as the code's standard input.")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Send this command's own input to the code while it runs.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=MIN_TIMEOUT_S, help="Time limit in seconds.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Directory to save the run's artifacts in.")] = None,
    memory_mb: MemoryMb = None,
    cpus: Cpus = None,
    sandbox: Annotated[str | None, typer.Option(help="Run it in this sandbox of a server instead.")] = None,
    url: Annotated[str | None, typer.Option(help="Run it on the server at this address.")] = None,
) -> None:
    """Run a file in a fresh sandbox, print its output, and destroy the sandbox."""
    from mcp_sandbox.commands.run import Source, run_once, template_for

    if sandbox and (template or memory_mb or cpus):
        fail("A sandbox has its template and size already: give --sandbox, or the others.", EXIT_USAGE)
    if interactive and (stdin or file.name == "<stdin>"):
        fail("With --interactive the input is this command's own: give a file, and no --stdin.", EXIT_USAGE)
    template = template if template or sandbox else template_for(file.name)
    source = Source(
        _text_of(file), template, _text_of(stdin) if stdin else None, memory_mb, cpus, interactive=interactive
    )
    if url or sandbox:
        from mcp_sandbox.commands.remote.run import run_there

        raise typer.Exit(run_there(settings_of(ctx), url, sandbox, source, timeout_s, save))
    raise typer.Exit(run_once(settings_of(ctx), source, timeout_s, save))


def _text_of(file: typer.FileText) -> str:
    try:
        return file.read()
    except UnicodeDecodeError:
        fail(f"{file.name} is not UTF-8 text. Code and its input must be text.", EXIT_USAGE)


@app.command()
def setup(
    ctx: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="Only show what is missing.")] = False,
    driver: Annotated[str | None, typer.Option(help="Driver to set up. Default: the one that would be used.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Also install the tools for OCI images and Dockerfiles.")
    ] = False,
    runsc: Annotated[
        str | None,
        typer.Option("--runsc", metavar="PATH|URL|none", help="Use this gVisor instead of Debian's; none: Debian's."),
    ] = None,
    sha512: Annotated[str | None, typer.Option("--sha512", metavar="HEX", help="Checksum of that gVisor.")] = None,
) -> None:
    """Install what the driver needs: system packages, and a guest kernel or gVisor."""
    from mcp_sandbox.commands import setup as setup_cli
    from mcp_sandbox.commands.setup_runsc import WantedRunsc

    ctx.find_root().obj |= {"driver": driver} if driver else {}
    settings = settings_of(ctx)
    try:
        wanted = WantedRunsc.parse(settings, runsc, sha512, check=check) if runsc is not None else None
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    if sha512 and not runsc:
        fail("--sha512 belongs to --runsc.", EXIT_USAGE)
    raise typer.Exit(setup_cli.main(settings, check=check, images=images, runsc=wanted))


@app.command()
def doctor(
    ctx: typer.Context,
    web: Annotated[bool, typer.Option("--web", help="Also ask each web search provider.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show whether this host can run sandboxes, how well, and how to fix what is missing."""
    from mcp_sandbox.commands import doctor_view

    raise typer.Exit(doctor_view.main(settings_of(ctx), as_json=as_json, ask_web=web))


@app.command()
def demo(ctx: typer.Context) -> None:
    """Take a short tour of the product with a real MCP client."""
    from mcp_sandbox.commands import demo as demo_cli

    raise typer.Exit(demo_cli.main(settings_of(ctx)))


@app.command()
def bench(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Topics: restore, startup, calls, commands, connect, http, neighbour, tunnel, hostile, modes, fetch, "
            "cpu, compile, pool, first, fork, idle, soak. Default: all but soak."
        ),
    ] = None,
    driver: Annotated[str | None, typer.Option(help="Driver to measure. Default: all that work on this host.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take fewer samples.")] = False,
    soak: Annotated[bool, typer.Option("--soak", help="Also measure soak, which takes many minutes.")] = False,
    cycles: Annotated[int | None, typer.Option(min=1, help="Number of sandboxes in a soak.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure on this host the numbers that docs/specification.md promises."""
    from mcp_sandbox.commands.bench import command

    ctx.find_root().obj |= {"driver": driver} if driver else {}
    settings = settings_of(ctx)
    raise typer.Exit(command.main(settings, names or (), quick=quick, with_soak=soak, cycles=cycles, as_json=as_json))


@app.command()
def selftest(
    ctx: typer.Context,
    security: Annotated[
        bool, typer.Option("--security", help="Attack sandboxes from inside instead, and show what holds.")
    ] = False,
    compat: Annotated[
        bool,
        typer.Option(
            "--compat", help="Run HumanEval, imports and the tests of numpy and CPython in sandboxes instead."
        ),
    ] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Run only cases with TEXT in their topic or name.")] = "",
    driver: Annotated[str | None, typer.Option(help="Driver to test. Default: the one that would be used.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check on this host that sandboxes work, or that they hold what docs/threat-model.md promises."""
    from mcp_sandbox.commands.selftest import command

    ctx.find_root().obj |= {"driver": driver} if driver else {}
    raise typer.Exit(command.main(settings_of(ctx), security=security, compat=compat, only=only, as_json=as_json))


@template_app.command("init")
def template_init(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the new template.")],
    language: Annotated[
        LanguageName | None, typer.Option(help="Language of its code. Default: python for Debian, shell for images.")
    ] = None,
    source: Annotated[Source, typer.Option(help="Source of its files.")] = "debian",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to create it in. Default: the first one of template_path.")
    ] = None,
) -> None:
    """Create a custom template: a commented template.toml that builds as it is."""
    from mcp_sandbox.commands import template_init as begin

    raise typer.Exit(begin.init(settings_of(ctx), name, language, source, directory))


@template_app.command("build")
def template_build(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Templates. Default: the `template` setting.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Build all templates.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Rebuild whenever one of them changes.")] = False,
) -> None:
    """Build templates: files, guest kernel and snapshot. Steps whose inputs have not changed are skipped."""
    from mcp_sandbox.commands import template_build as building

    raise typer.Exit(building.build(settings_of(ctx), names or (), every=every, watch=watch))


@template_app.command("update")
def template_update(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Templates. Default: the `template` setting.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Update all templates.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be updated.")] = False,
) -> None:
    """Rebuild templates with newer Debian packages, guest kernels and gVisor releases."""
    from mcp_sandbox.commands import template_update as updating

    raise typer.Exit(updating.update(settings_of(ctx), names or (), every=every, dry_run=dry_run))


@template_app.command("list")
def template_list(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List all templates and whether they are built."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.show_all(settings_of(ctx), as_json=as_json))


@template_app.command("show")
def template_show(ctx: typer.Context, name: TemplateName = None) -> None:
    """Show a template's definition and its builds."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.show(settings_of(ctx), name))


@template_app.command("remove")
def template_remove(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Template.")]) -> None:
    """Remove a template's builds, except those in use. Its definition stays."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.remove(settings_of(ctx), name))


@template_app.command("prune")
def template_prune(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also remove the builds of current templates.")] = False,
) -> None:
    """Remove builds that no template needs, except those that sandboxes or servers use."""
    from mcp_sandbox.commands import template

    raise typer.Exit(template.prune(settings_of(ctx), dry_run=dry_run, every=every))


@web_app.command("search")
def web_search(
    ctx: typer.Context,
    query: Annotated[str, typer.Argument(help="What to search for.")],
    max_results: Annotated[int, typer.Option(min=1, max=20, help="Most results of a page.")] = 8,
    site: Annotated[str | None, typer.Option(help="Only pages of this domain and those below it.")] = None,
    time_range: Annotated[TimeRange | None, typer.Option(help="Only pages of this time.")] = None,
    language: Annotated[str | None, typer.Option(help="Language of the pages, such as en or pt-BR.")] = None,
    page: Annotated[int, typer.Option(min=1, max=20, help="Page of the results.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Search the web, with the providers of the settings."""
    from mcp_sandbox.commands import web_search as searching
    from websearch.search import SearchRequest

    request = SearchRequest(
        query=query, max_results=max_results, site=site, time_range=time_range, language=language, page=page
    )
    raise typer.Exit(searching.main(settings_of(ctx), request, as_json=as_json))


@web_app.command("fetch")
def web_fetch(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(help="Address, http:// or https://.")],
    page_format: Annotated[
        PageFormat, typer.Option("--format", help="The main content as markdown or text, clean html, or the source.")
    ] = "markdown",
    max_chars: Annotated[int, typer.Option(min=1, help="Most characters to print.")] = 20_000,
    output: Annotated[Path | None, typer.Option(help="Save the whole download as this file instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page and what is known about it as JSON.")] = False,
) -> None:
    """Fetch a page from the web and print what it says."""
    from mcp_sandbox.commands import web_fetch as fetching
    from mcp_sandbox.web.fetching import FetchRequest

    request = FetchRequest(url=url, max_chars=max_chars, format=page_format, keep=output is not None)
    raise typer.Exit(fetching.main(settings_of(ctx), request, as_json=as_json, output=output))


@app.command()
def metrics(ctx: typer.Context) -> None:
    """Print the metrics of all servers that use this home, in the Prometheus text format."""
    from mcp_sandbox.commands import sandbox

    raise typer.Exit(sandbox.print_metrics(settings_of(ctx)))


@app.command()
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Serve MCP over HTTP for many clients. Only programs of this host reach it, unless --host says otherwise."""
    from mcp_sandbox.commands.common import report_errors
    from mcp_sandbox.serving.http import run_http

    given = {"host": host, "port": port}
    ctx.find_root().obj["serve"] = {name: value for name, value in given.items() if value is not None} or None
    settings = settings_of(ctx)

    def run_it() -> int:
        run_http(settings)
        return 0

    raise typer.Exit(report_errors(run_it))


@app.command()
def install(
    ctx: typer.Context,
    client: Annotated[str, typer.Argument(help="claude-code, claude-desktop, vscode, cursor, zed or codex.")],
    undo: Annotated[bool, typer.Option("--undo", help="Remove the server from the client again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
) -> None:
    """Add this server to the configuration of an IDE or agent. Shows the change and keeps the old file."""
    from mcp_sandbox.commands.install import command

    settings_of(ctx)  # a client would only show that the server does not start
    raise typer.Exit(command.install(client, undo=undo, dry_run=dry_run))


@token_app.command("create")
def token_create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the token.")],
    owner: Annotated[str | None, typer.Option(help="Whose sandboxes it may use. Default: the token's name.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="It may only read.")] = False,
    operate: Annotated[bool, typer.Option("--operate", help="It may also read the server's metrics.")] = False,
    days: Annotated[float | None, typer.Option(min=0, help="Days until it expires. Default: never.")] = None,
    sandboxes: Annotated[int | None, typer.Option(min=1, help="Instead of limits.owner_sandboxes.")] = None,
    memory_mb: Annotated[int | None, typer.Option(min=128, help="Instead of limits.owner_memory_mb.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Instead of limits.owner_runs.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Instead of the server's setting.")] = None,
) -> None:
    """Create a token and print it. It is shown only once."""
    from mcp_sandbox.commands import token

    grant = token.Grant(
        *(owner, read_only, operate, days),
        *(sandboxes, memory_mb, runs, requests_per_minute),
    )
    raise typer.Exit(token.create(settings_of(ctx), name, grant))


@token_app.command("list")
def token_list(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List all tokens, without their secrets."""
    from mcp_sandbox.commands import token

    raise typer.Exit(token.show(settings_of(ctx), as_json=as_json))


@token_app.command("revoke")
def token_revoke(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Name of the token.")]) -> None:
    """Remove a token. Running servers refuse it at once; its sandboxes end when they are idle."""
    from mcp_sandbox.commands import token

    raise typer.Exit(token.revoke(settings_of(ctx), name))
