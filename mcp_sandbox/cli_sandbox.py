"""The commands about sandboxes of running servers."""

from typing import Annotated, Literal

import typer

from mcp_sandbox.cli_base import AsJson, Cpus, MemoryMb, Url, settings_of
from mcp_sandbox.stdio_command import EXIT_USAGE, fail

sandbox_app = typer.Typer(no_args_is_help=True, help="Create, list, copy and close the sandboxes of running servers.")

LAST_PORT = 65535
SandboxId = Annotated[str, typer.Argument(help="Sandbox ID.")]
Mode = Literal["none", "proxy", "nat"]  # as in vmm.types, which takes long to import
Reseed = Literal["global", "all"]  # as in mcp_sandbox.views


@sandbox_app.command("create")
def create(
    ctx: typer.Context,
    template: Annotated[str | None, typer.Option(help="Template. Default: the server's.")] = None,
    ttl_s: Annotated[float | None, typer.Option("--ttl", help="Seconds after which it ends in any case.")] = None,
    idle_s: Annotated[float | None, typer.Option("--idle", help="Seconds without use after which it ends.")] = None,
    memory_mb: MemoryMb = None,
    cpus: Cpus = None,
    network: Annotated[Mode, typer.Option(help="What it may reach, if the operator allows it.")] = "none",
    allow_domain: Annotated[
        list[str] | None, typer.Option(help="With proxy: reach only this domain; may be repeated.")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Create a sandbox on a server and print its ID."""
    from mcp_sandbox.commands.remote import sandboxes

    wanted = {
        "template": template,
        "ttl_s": ttl_s,
        "idle_s": idle_s,
        "memory_mb": memory_mb,
        "cpus": cpus,
        "network": network,
        "allow_domains": allow_domain or None,
    }
    raise typer.Exit(sandboxes.create(settings_of(ctx), url, wanted, as_json=as_json))


@sandbox_app.command("list")
def list_all(ctx: typer.Context, as_json: AsJson = False, url: Url = None) -> None:
    """List the sandboxes of all servers of this home, and what killed servers left. With --url, list yours there."""
    from mcp_sandbox.commands import sandbox
    from mcp_sandbox.commands.remote import sandboxes

    settings = settings_of(ctx)
    if url := url or settings.connect:
        raise typer.Exit(sandboxes.list_all(settings, url, as_json=as_json))
    raise typer.Exit(sandbox.show(settings, as_json=as_json))


@sandbox_app.command("show")
def show(ctx: typer.Context, sandbox_id: SandboxId, as_json: AsJson = False, url: Url = None) -> None:
    """Show a sandbox: how it is isolated, what it may use, and when it ends."""
    from mcp_sandbox.commands.remote import sandboxes

    raise typer.Exit(sandboxes.show(settings_of(ctx), url, sandbox_id, as_json=as_json))


@sandbox_app.command("close")
def close(ctx: typer.Context, sandbox_id: SandboxId, url: Url = None) -> None:
    """Close a sandbox of any owner; with --url, one of yours there. Its variables and files are lost."""
    from mcp_sandbox.commands import sandbox
    from mcp_sandbox.commands.remote import sandboxes

    settings = settings_of(ctx)
    url = url or settings.connect
    raise typer.Exit(sandboxes.close(settings, url, sandbox_id) if url else sandbox.close(settings, sandbox_id))


@sandbox_app.command("fork")
def fork(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    count: Annotated[int, typer.Option(min=1, help="Number of copies.")] = 1,
    reseed: Annotated[
        Reseed, typer.Option(help="Random generators that get a new state: those of modules, or all that are found.")
    ] = "global",
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Copy a sandbox with its variables, processes and files, and print the IDs of the copies."""
    from mcp_sandbox.commands.remote import sandboxes

    raise typer.Exit(sandboxes.fork(settings_of(ctx), url, sandbox_id, count, reseed, as_json=as_json))


def shell(
    ctx: typer.Context,
    sandbox_id: Annotated[str | None, typer.Argument(help="Sandbox ID. Default: a new one, closed afterwards.")] = None,
    template: Annotated[str | None, typer.Option(help="Template of the new sandbox.")] = None,
    url: Url = None,
) -> None:
    """Open a terminal in a sandbox. The exit code is that of its shell."""
    from mcp_sandbox.commands.remote import shell as terminal

    if sandbox_id and template:
        fail("A sandbox has its template already: give an ID or --template.", EXIT_USAGE)
    raise typer.Exit(terminal.shell(settings_of(ctx), url, sandbox_id, template))


def port(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    ports: Annotated[
        str,
        typer.Argument(metavar="PORT[:HOST_PORT]", help="Port in the sandbox, and of this host. Default: the same."),
    ],
    url: Url = None,
) -> None:
    """Open a port of a sandbox on the loopback of this host, such as that of a web server, until Ctrl-C."""
    from mcp_sandbox.commands.remote import port as forwarding

    inner, _, outer = ports.partition(":")
    numbers = [int(text) if text.isdecimal() else -1 for text in (inner, outer or inner)]
    if not 0 < numbers[0] <= LAST_PORT or not 0 <= numbers[1] <= LAST_PORT:
        fail(f"{ports!r} is not PORT or PORT:HOST_PORT, as in 8000 or 8000:8080.", EXIT_USAGE)
    raise typer.Exit(forwarding.forward(settings_of(ctx), url, sandbox_id, *numbers))


def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="File or directory; ID:PATH in a sandbox.")],
    target: Annotated[str, typer.Argument(help="Where to; ID:PATH in a sandbox. Relative paths start at /workspace.")],
    url: Url = None,
) -> None:
    """Copy files and directories into a sandbox or out of it."""
    from mcp_sandbox.commands.remote import copying

    raise typer.Exit(copying.copy(settings_of(ctx), url, source, target))


def logs(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    run_id: Annotated[str | None, typer.Argument(help="Run. Default: the newest active one.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print output as it comes, until the run ends.")
    ] = False,
    url: Url = None,
) -> None:
    """Print what a background run has written. With --follow, the exit code is that of the run."""
    from mcp_sandbox.commands.remote import logs as printing

    raise typer.Exit(printing.show(settings_of(ctx), url, sandbox_id, run_id, follow=follow))
