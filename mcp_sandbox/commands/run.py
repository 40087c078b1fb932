"""`mcp-sandbox run`: one file in one fresh sandbox, with its output where a shell expects it."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TextIO

from guest.client.reports import CompiledReport
from guest.places import OUTPUTS
from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import EXIT_ERROR, guarded
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import FileError
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import RunView, StreamView
from mcp_sandbox.views.text import compiled_parts, readable

OWNER = "command line"
TEMPLATES = dict.fromkeys((".cpp", ".cc", ".cxx"), "cpp-algorithm") | {".go": "go-algorithm"}
EXIT_TIMEOUT = 124  # as timeout(1) says it
_CONTROLS = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # colours, and all but tab and newline


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be run, and where."""

    code: str
    template: str | None
    stdin: str | None


def template_for(file_name: str) -> str | None:
    """The template that understands a file of this name; None: the default one has to."""
    return TEMPLATES.get(PurePosixPath(file_name).suffix)


def run_once(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    """Run code; the result is an exit status."""
    return guarded(lambda: run_command(lambda: _run(settings, source, timeout_s, save)))


async def _run(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    async with open_host(settings) as host, open_service(host, pooled=False) as service:
        box = (await service.create(OWNER, source.template)).sandbox_id
        result = await service.run(CodeRun(OWNER, source.code, box, timeout_s=timeout_s, stdin=source.stdin))
        _print(result)
        if save is not None:
            await _save(service, box, result, save)
    return _exit_status(result)


def _print(result: RunView) -> None:
    _write(sys.stdout, _whole(result.stdout))
    for display in result.displays:
        if value := readable(display):
            _write(sys.stdout, f"{value.rstrip()}\n")
    sys.stdout.flush()
    _write(sys.stderr, _whole(result.stderr))
    if isinstance(result.report, CompiledReport):
        for part in compiled_parts(result.report):
            _write(sys.stderr, f"{part}\n" if part else "")
    if result.error is not None:
        _write(sys.stderr, f"{result.error.traceback.rstrip() or result.error.message}\n")
    if result.timed_out_after_s is not None:
        sys.stderr.write(f"mcp-sandbox: stopped after {result.timed_out_after_s:g} s\n")


def _write(stream: TextIO, text: str) -> None:
    """Write what code has written; it may not steer a terminal."""
    stream.write(_CONTROLS.sub("", text) if stream.isatty() else text)


def _whole(captured: StreamView) -> str:
    gap = f"\n[… {captured.omitted_bytes:,} bytes left out …]\n" if captured.omitted_bytes else ""
    return f"{captured.head}{gap}{captured.tail}"


async def _save(service: SandboxService, box: str, result: RunView, directory: Path) -> None:
    for artifact in result.artifacts:
        name = _safe_name(artifact.path)
        if name is None:
            sys.stderr.write(f"not saved: {artifact.path!r} has a name that is hidden or leads elsewhere\n")
            continue
        target = directory / name
        try:
            data = await service.read_all(OWNER, box, artifact.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(data)
        except (FileError, OSError) as problem:
            sys.stderr.write(f"not saved: {problem}\n")
        else:
            sys.stderr.write(f"saved {target}\n")


def _safe_name(path: str) -> PurePosixPath | None:
    """Where below a directory an artifact may land: its path is the machine's choice, what is on the host is not."""
    try:
        name = PurePosixPath(path).relative_to(OUTPUTS)
    except ValueError:
        return None
    good = name.parts and all(part.isprintable() and not part.startswith(".") for part in name.parts)
    return name if good else None


def _exit_status(result: RunView) -> int:
    if result.timed_out_after_s is not None:
        return EXIT_TIMEOUT
    if result.status == "exited" and result.exit_code is not None:
        return result.exit_code & 0xFF
    return 0 if result.status == "ok" else EXIT_ERROR
