"""How a build step runs other programs: everything they print goes to the step's log."""

import os
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vmm.errors import ToolFailed, ToolMissing
from vmm.process import find_tool, run_tool

TAIL_LINES = 30  # of the log, shown with an error: enough for a traceback of pip or a refusal of apt


class StepFailed(Exception):
    """Why a step cannot go on, in words for people; what its tools said is in the log."""


class Tools(Protocol):
    """Runs the programs of one build step."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        together: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run a program to its end and return the lines it printed; raises StepFailed unless it succeeds.

        With `together`, and as root, all that it starts and mounts ends with it, however it or this process ends.
        """
        ...

    def note(self, text: str) -> None:
        """Add a line of our own to the log."""
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
        together: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        self._write(f"$ {shlex.join(argv)}")
        lines: list[str] = []

        def take(line: str) -> None:
            lines.append(line)
            self._write(line)
            if line.strip():
                self._on_line(line.strip())

        try:
            await run_tool(
                ended_together(argv) if together else argv,
                on_line=take,
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


def ended_together(argv: Sequence[str]) -> list[str]:
    """A program as the first of namespaces of its own: what is left of them ends with it, and it with whoever builds.

    Not for ordinary users: within a namespace of theirs, tools could not make their own.
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
    """The last lines of a log, for people who want to know why."""
    try:
        with log_path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=TAIL_LINES))
    except OSError:
        return ""
