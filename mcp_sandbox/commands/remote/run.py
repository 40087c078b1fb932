"""`mcp-sandbox run` on a server: in one of its sandboxes, or in a fresh one."""

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.client import Server, refusal_of
from mcp_sandbox.commands.remote.errors import RequestRefused
from mcp_sandbox.commands.remote.interactive import carry
from mcp_sandbox.commands.remote.sandboxes import SANDBOXES, path_of, server_for
from mcp_sandbox.commands.run import Source
from mcp_sandbox.commands.run_output import exit_code, print_run, safe_name
from mcp_sandbox.config import Settings
from mcp_sandbox.private import users_umask
from mcp_sandbox.views import RunView

WAIT_S = 30  # how long one look for the result waits
EXIT_STOPPED = 130  # as shells return for an interrupted command


def run_there(
    settings: Settings,
    url: str | None,
    sandbox_id: str | None,
    source: Source,
    timeout_s: float | None,
    save: Path | None,
) -> int:
    """Run code, print its output when it has ended, and return an exit code. An interrupt stops the run."""
    # In the background more would be the default, as it is for input that somebody types.
    limit_s = settings.runs.timeout_s if timeout_s is None and not source.interactive else timeout_s

    def work() -> int:
        server = server_for(settings, url)
        for number in (signal.SIGTERM, signal.SIGHUP):  # they must not leave the run and its sandbox behind
            signal.signal(number, signal.default_int_handler)
        body = {"code": source.code, "stdin": source.stdin, "timeout_s": limit_s, "background": True}
        body["stdin_open"] = source.interactive
        with _box(server, sandbox_id, source) as box:
            started = server.post(f"{box}/runs", body)
            run = f"{box}/runs/{started['run_id']}"
            try:
                if source.interactive:
                    carry(server, run)
                result = _result(server, run)
            except KeyboardInterrupt:
                server.post(f"{run}/stop")
                return EXIT_STOPPED
            print_run(result, output=not source.interactive)
            if save is not None:
                _save(server, box, result, save)
        return exit_code(result)

    return report_errors(work)


@contextmanager
def _box(server: Server, sandbox_id: str | None, source: Source) -> Iterator[str]:
    """Yield the path of a sandbox: the one that is named, or a fresh one that is closed afterwards."""
    if sandbox_id is not None:
        yield path_of(sandbox_id)
        return
    wanted = {"template": source.template, "memory_mb": source.memory_mb, "cpus": source.cpus}
    box = path_of(server.post(SANDBOXES, wanted)["sandbox_id"])
    try:
        yield box
    finally:
        server.delete(box)


def _result(server: Server, run: str) -> RunView:
    while True:
        progress = server.get(run, wait_s=WAIT_S)
        if progress["result"] is not None:
            return RunView.model_validate({**progress["result"], "images": ()}, strict=False)
        if progress["error"] is not None:
            error = progress["error"]
            raise refusal_of({"code": error["code"], "detail": error["message"], "fields": error["fields"]})


def _save(server: Server, box: str, result: RunView, directory: Path) -> None:
    for artifact in result.artifacts:
        name = safe_name(artifact.path)
        if name is None:
            sys.stderr.write(f"not saved: {artifact.path!r} has a hidden name or lies outside the outputs directory\n")
            continue
        target = directory / name
        part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
        try:
            with users_umask(), server.download(f"{box}/files/content", path=artifact.path) as (_, parts):
                target.parent.mkdir(parents=True, exist_ok=True)
                with part.open("xb") as file:
                    file.writelines(parts)
            os.link(part, target)  # when it is complete, and only if there is no such file
        except (RequestRefused, OSError) as problem:
            sys.stderr.write(f"not saved: {problem}\n")
        else:
            sys.stderr.write(f"saved {target}\n")
        finally:
            part.unlink(missing_ok=True)
    if not result.artifacts_complete:
        sys.stderr.write("not saved: the run left more files; `mcp-sandbox cp` copies the whole directory\n")
