"""What all commands share: the settings of a command line, and how it fails."""

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from mcp_sandbox.config import Settings

EXIT_USAGE = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
MemoryMb = Annotated[int | None, typer.Option(min=1, help="Memory of the sandbox. Default: the template's.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="CPUs of the sandbox. Default: the template's.")]
Url = Annotated[
    str | None, typer.Option(help="Address of the server. Default: the setting connect, or the server of this home.")
]


def fail(message: str, code: int = 1) -> NoReturn:
    """Print a message on stderr and exit."""
    typer.echo(f"mcp-sandbox: {message}", err=True)
    raise typer.Exit(code)


def settings_of(ctx: typer.Context) -> "Settings":
    """Return the settings for this command line, with a home that is closed to other users. Exits if that fails."""
    from mcp_sandbox.config import ConfigError, load_settings
    from vmm.errors import Untrusted
    from vmm.trust import make_private

    try:
        settings = load_settings(**ctx.find_root().obj)
        if make_private(settings.home):
            typer.echo(f"mcp-sandbox: other users could read {settings.home}; its mode is 0700 now", err=True)
    except (ConfigError, Untrusted) as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:  # of the home, or of a working directory that is gone
        fail(str(error))
    return settings
