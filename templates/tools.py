"""How a build step runs other programs: everything they print goes to the step's log."""

import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vmm.errors import ToolFailed, ToolMissing
from vmm.process import run_tool

TAIL_LINES = 30  # of the log, shown with an error: enough for a traceback of pip or a refusal of apt


class StepFailed(Exception):
    """Why a step cannot go on, in words for people; what its tools said is in the log."""


class Tools(Protocol):
    """Runs the programs of one build step."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        within: Sequence[str] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run a program to its end and return the lines it printed; raises StepFailed unless it succeeds.

        `within` is a command that becomes the program, such as one that takes rights away first.
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
        within: Sequence[str] = (),
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
            await run_tool([*within, *argv], on_line=take, env={"LC_ALL": "C.UTF-8", **(env or {})}, cwd=cwd)
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


def tail(log_path: Path) -> str:
    """The last lines of a log, for people who want to know why."""
    try:
        with log_path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=TAIL_LINES))
    except OSError:
        return ""
