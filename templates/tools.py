"""Run the programs of a build step and write their output to the step's log."""

import os
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vmm.errors import ToolFailed, ToolMissing
from vmm.process import find_tool, run_tool

TAIL_LINES = 30  # shown with an error: enough for a pip traceback or an apt error


class StepFailed(Exception):
    """A build step cannot continue. Its log has the output of its programs."""


class Tools(Protocol):
    """Runs the programs of one build step."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        isolated: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run a program and return the lines it printed; raises StepFailed unless it succeeds.

        With `isolated`, and as root, its processes and mounts end with it, even if this process is killed.
        """
        ...

    def note(self, text: str) -> None:
        """Add a line to the log."""
        ...


class LoggedTools:
    """Runs programs, writes their output to a log and reports each line."""

    def __init__(self, log_path: Path, on_line: Callable[[str], None]) -> None:
        self._log_path = log_path
        self._on_line = on_line
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_text("")

    async def run(
        self,
        argv: Sequence[str],
        *,
        isolated: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        self._write(f"$ {shlex.join(argv)}")
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            self._write(line)
            if line.strip():
                self._on_line(line.strip())

        try:
            await run_tool(
                in_own_namespaces(argv) if isolated else argv,
                on_line=on_line,
                env={"LC_ALL": "C.UTF-8", **(env or {})},
                cwd=cwd,
            )
        except ToolMissing as error:
            raise StepFailed(str(error)) from None
        except ToolFailed as error:
            how = f"signal {error.exit.signal}" if error.exit.signal else f"status {error.exit.code}"
            raise StepFailed(f"{Path(argv[0]).name} ended with {how}") from error
        return lines

    def note(self, text: str) -> None:
        self._write(text)
        self._on_line(text)

    def _write(self, line: str) -> None:
        with self._log_path.open("a") as log:
            log.write(f"{line}\n")


def in_own_namespaces(argv: Sequence[str]) -> list[str]:
    """Return a command that runs `argv` in its own pid and mount namespaces and kills it when this process dies.

    As an ordinary user it returns `argv`: a user namespace would keep the tools from creating theirs.
    """
    if os.geteuid() != 0:
        return list(argv)
    if (program := find_tool(argv[0])) is None:
        raise ToolMissing(argv[0])
    return [
        *("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"),
        *(program, *argv[1:]),
    ]


def tail(log_path: Path) -> str:
    """Return the last lines of a log."""
    try:
        with log_path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=TAIL_LINES))
    except OSError:
        return ""
