"""How commands show a run: its output, its exit code, and where its artifacts may be saved."""

import re
import sys
from pathlib import PurePosixPath
from typing import TextIO

from guest.client.reports import CompiledReport
from guest.places import OUTPUTS
from mcp_sandbox.commands.common import EXIT_ERROR
from mcp_sandbox.views import RunView, StreamView
from mcp_sandbox.views.text import compiled_parts, missing_module, readable

EXIT_TIMEOUT = 124  # as timeout(1) returns
_CONTROLS = re.compile(
    r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # colours, and control characters but tab and newline


def print_run(result: RunView, *, output: bool = True) -> None:
    """Print what a run has written, shown and failed with; without `output`, that was printed before."""
    if output:
        write_output(sys.stdout, _text(result.stdout))
    for display in result.displays:
        if value := readable(display):
            write_output(sys.stdout, f"{value.rstrip()}\n")
    sys.stdout.flush()
    if output:
        write_output(sys.stderr, _text(result.stderr))
    if isinstance(result.report, CompiledReport):
        for part in compiled_parts(result.report):
            write_output(sys.stderr, f"{part}\n" if part else "")
    if result.error is not None:
        write_output(sys.stderr, f"{result.error.traceback.rstrip() or result.error.message}\n")
    if result.missing_module is not None:
        sys.stderr.write(f"mcp-sandbox: {missing_module(result.missing_module, '--template {}')}\n")
    if result.timed_out_after_s is not None:
        sys.stderr.write(f"mcp-sandbox: the run was stopped after {result.timed_out_after_s:g} s (--timeout)\n")


def write_output(stream: TextIO, text: str) -> None:
    """Write output of the code, without control sequences if the stream is a terminal."""
    stream.write(_CONTROLS.sub("", text) if stream.isatty() else text)


def _text(captured: StreamView) -> str:
    gap = f"\n[… {captured.omitted_bytes:,} bytes omitted …]\n" if captured.omitted_bytes else ""
    return f"{captured.head}{gap}{captured.tail}"


def safe_name(path: str) -> PurePosixPath | None:
    """Return an artifact's path below the outputs directory, or None if it could hide or overwrite files on the host.

    The path comes from the machine and is not trusted.
    """
    try:
        name = PurePosixPath(path).relative_to(OUTPUTS)
    except ValueError:
        return None
    good = name.parts and all(part.isprintable() and not part.startswith(".") for part in name.parts)
    return name if good else None


def exit_code(result: RunView) -> int:
    """Return the exit code of a command that has done this run."""
    if result.timed_out_after_s is not None:
        return EXIT_TIMEOUT
    if result.status == "exited" and result.exit_code is not None:
        return result.exit_code & 0xFF
    return 0 if result.status == "ok" else EXIT_ERROR
