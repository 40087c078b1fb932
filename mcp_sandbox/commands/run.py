"""`mcp-sandbox run`: run a file in a fresh sandbox, with its output on stdout and stderr."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TextIO

from guest.client.reports import CompiledReport
from guest.places import OUTPUTS
from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import EXIT_ERROR, report_errors
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import FileError
from mcp_sandbox.private import users_umask
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import ArtifactView, RunView, StreamView
from mcp_sandbox.views.text import compiled_parts, readable

OWNER = "command line"
TEMPLATES = dict.fromkeys((".cpp", ".cc", ".cxx"), "cpp-algorithm") | {".go": "go-algorithm"}
MAX_LISTED = 5000  # files and directories; no honest agent lists more
EXIT_TIMEOUT = 124  # as timeout(1) returns
_CONTROLS = re.compile(
    r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # colours, and control characters but tab and newline


@dataclass(frozen=True, slots=True)
class Source:
    """The code to run, its input, and the template of its sandbox."""

    code: str
    template: str | None
    stdin: str | None


def template_for(file_name: str) -> str | None:
    """Return the template for a file by its suffix; None means the default template."""
    return TEMPLATES.get(PurePosixPath(file_name).suffix)


def run_once(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    """Run code, print its output, and return an exit code."""
    return report_errors(lambda: run_command(lambda: _run(settings, source, timeout_s, save)))


async def _run(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    async with open_host(settings) as host, open_service(host, pooled=False) as service:
        box = (await service.create(OWNER, source.template)).sandbox_id
        result = await service.run(CodeRun(OWNER, source.code, box, timeout_s=timeout_s, stdin=source.stdin))
        _print(result)
        if save is not None:
            await _save(service, box, result, save)
    return _exit_code(result)


def _print(result: RunView) -> None:
    _write(sys.stdout, _text(result.stdout))
    for display in result.displays:
        if value := readable(display):
            _write(sys.stdout, f"{value.rstrip()}\n")
    sys.stdout.flush()
    _write(sys.stderr, _text(result.stderr))
    if isinstance(result.report, CompiledReport):
        for part in compiled_parts(result.report):
            _write(sys.stderr, f"{part}\n" if part else "")
    if result.error is not None:
        _write(sys.stderr, f"{result.error.traceback.rstrip() or result.error.message}\n")
    if result.timed_out_after_s is not None:
        sys.stderr.write(f"mcp-sandbox: the run was stopped after {result.timed_out_after_s:g} s (--timeout)\n")


def _write(stream: TextIO, text: str) -> None:
    """Write output of the code, without control sequences if the stream is a terminal."""
    stream.write(_CONTROLS.sub("", text) if stream.isatty() else text)


def _text(captured: StreamView) -> str:
    gap = f"\n[… {captured.omitted_bytes:,} bytes omitted …]\n" if captured.omitted_bytes else ""
    return f"{captured.head}{gap}{captured.tail}"


async def _save(service: SandboxService, box: str, result: RunView, directory: Path) -> None:
    artifacts, complete = await _artifacts(service, box, result)
    for artifact in artifacts:
        name = _safe_name(artifact.path)
        if name is None:
            sys.stderr.write(f"not saved: {artifact.path!r} has a hidden name or lies outside the outputs directory\n")
            continue
        target = directory / name
        try:
            data = await service.read_all(OWNER, box, artifact.path)
            with users_umask():
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    file.write(data)
        except (FileError, OSError) as problem:
            sys.stderr.write(f"not saved: {problem}\n")
        else:
            sys.stderr.write(f"saved {target}\n")
    if not complete:
        sys.stderr.write(f"not saved: {OUTPUTS} has more files than can be listed\n")


async def _artifacts(service: SandboxService, box: str, result: RunView) -> tuple[Sequence[ArtifactView], bool]:
    """Return the artifacts of the only run in `box`, and whether these are all."""
    if result.artifacts_complete:
        return result.artifacts, True
    found: list[ArtifactView] = []
    offset: int | None = 0
    while offset is not None and offset < MAX_LISTED:
        page = await service.artifacts(OWNER, box, offset=offset)
        found += page.artifacts
        offset = page.next_offset
    spills = (result.stdout.spill, result.stderr.spill)
    return [artifact for artifact in found if artifact.path not in spills], not page.truncated


def _safe_name(path: str) -> PurePosixPath | None:
    """Return an artifact's path below the outputs directory, or None if it could hide or overwrite files on the host.

    The path comes from the machine and is not trusted.
    """
    try:
        name = PurePosixPath(path).relative_to(OUTPUTS)
    except ValueError:
        return None
    good = name.parts and all(part.isprintable() and not part.startswith(".") for part in name.parts)
    return name if good else None


def _exit_code(result: RunView) -> int:
    if result.timed_out_after_s is not None:
        return EXIT_TIMEOUT
    if result.status == "exited" and result.exit_code is not None:
        return result.exit_code & 0xFF
    return 0 if result.status == "ok" else EXIT_ERROR
