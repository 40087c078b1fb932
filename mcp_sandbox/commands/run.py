"""`mcp-sandbox run`: run a file in a fresh sandbox, with its output on stdout and stderr."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from guest.languages import NAMES, language
from guest.places import OUTPUTS
from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.interactive import run_interactively
from mcp_sandbox.commands.run_output import exit_code, print_run, safe_name
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import FileError
from mcp_sandbox.private import users_umask
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import ArtifactView, RunView

OWNER = "command line"
MAX_LISTED = 5000  # files and directories; no honest agent lists more


@dataclass(frozen=True, slots=True)
class Source:
    """The code to run, its input, and the template and size of its sandbox; None: the default."""

    code: str
    template: str | None
    stdin: str | None
    memory_mb: int | None = None
    cpus: int | None = None
    interactive: bool = False  # its input is this command's own


def template_for(file_name: str) -> str | None:
    """Return the template for a file by its suffix; None means the default template."""
    suffix = PurePosixPath(file_name).suffix
    found = (name for name in NAMES if name != "python" and suffix in language(name).suffixes)
    return next((language(name).template for name in found), None)


def run_once(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    """Run code, print its output, and return an exit code."""
    return report_errors(lambda: run_command(lambda: _run(settings, source, timeout_s, save)))


async def _run(settings: Settings, source: Source, timeout_s: float | None, save: Path | None) -> int:
    async with open_host(settings) as host, open_service(host, pooled=False) as service:
        view = await service.create(OWNER, source.template, memory_mb=source.memory_mb, cpus=source.cpus)
        box = view.sandbox_id
        request = CodeRun(
            OWNER, source.code, box, timeout_s=timeout_s, stdin=source.stdin, stdin_open=source.interactive
        )
        result = await (run_interactively(service, request) if source.interactive else service.run(request))
        print_run(result, output=not source.interactive)
        if save is not None:
            await _save(service, box, result, save)
    return exit_code(result)


async def _save(service: SandboxService, box: str, result: RunView, directory: Path) -> None:
    artifacts, complete = await _artifacts(service, box, result)
    for artifact in artifacts:
        name = safe_name(artifact.path)
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
