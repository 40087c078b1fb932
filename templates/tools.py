"""Run the programs of a build step and write their output to the step's log."""

import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from templates.environment import proxies
from templates.namespaces import Private, in_own_namespaces
from templates.removal import remove_tree
from vmm.errors import ToolFailed, ToolMissing
from vmm.process import run_tool

TAIL_LINES = 30  # shown with an error: enough for a pip traceback or an apt error
MAX_LINES = 10_000  # of a program's output that are returned: apt's longest answers have a few hundred
MAX_LOG = 32 * 1024**2  # bytes; ordinary builds write less than one megabyte


class StepFailed(Exception):
    """A build step cannot continue. Its log has the output of its programs."""


class Tools(Protocol):
    """Runs the programs of one build step."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        private: Private | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run a program and return the last lines it printed; raises StepFailed unless it succeeds.

        Of our environment it gets only PATH and the proxies, and `env`. With `private` it has its own namespaces.
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
        private: Private | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        self._write(f"$ {shlex.join(argv)}")
        started = time.monotonic()
        lines: deque[str] = deque(maxlen=MAX_LINES)

        def on_line(line: str) -> None:
            lines.append(line)
            self._write(line)
            if line.strip():
                self._on_line(line.strip())

        try:
            await run_tool(
                in_own_namespaces(argv, private) if private else argv,
                on_line=on_line,
                env={**proxies(), **(env or {})},
                cwd=cwd,
            )
        except ToolMissing as error:
            raise StepFailed(str(error)) from None
        except ToolFailed as error:
            how = f"signal {error.exit.signal}" if error.exit.signal else f"status {error.exit.code}"
            raise StepFailed(f"{Path(argv[0]).name} ended with {how}") from error
        finally:
            if private:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(remove_tree, private.scratch)
            self._write(f"({Path(argv[0]).name} took {time.monotonic() - started:.1f} s)")
        return list(lines)

    def note(self, text: str) -> None:
        self._write(text)
        self._on_line(text)

    def _write(self, line: str) -> None:
        with self._log_path.open("a") as log:
            if log.tell() > MAX_LOG:  # the end matters: errors are there
                log.truncate(0)
                log.write("(earlier output is left out)\n")
            log.write(f"{line}\n")


def tail(log_path: Path) -> str:
    """Return the last lines of a log."""
    try:
        with log_path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=TAIL_LINES))
    except OSError:
        return ""
