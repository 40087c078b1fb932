"""What all commands share: their common options, and the settings of a command line."""

from typing import TYPE_CHECKING, Annotated

import typer

from mcp_sandbox.stdio_command import open_settings

if TYPE_CHECKING:
    from mcp_sandbox.config import Settings

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
MemoryMb = Annotated[int | None, typer.Option(min=1, help="Memory of the sandbox. Default: the template's.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="CPUs of the sandbox. Default: the template's.")]
Url = Annotated[
    str | None, typer.Option(help="Address of the server. Default: the setting connect, or the server of this home.")
]


def settings_of(ctx: typer.Context) -> "Settings":
    """Return the settings for this command line, with a home that is closed to other users. Exits if that fails."""
    return open_settings(**ctx.find_root().obj)
