"""What was found out about this host by trying, kept so that it need not be tried again before the host reboots."""

import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

DOUBT_S = 3600.0  # a host that was too busy to answer in time is asked again after an hour


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one question about this host."""

    usable: bool | None  # None: it could not be tried
    reason: str
    fix: str | None = None  # what would help
    doubtful: bool = False  # it only took too long: a quieter hour may answer otherwise


class Verdicts:
    """Verdicts in a directory, one file a question. They hold for one boot, kernel and user."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def file(self, question: str) -> Path:
        """Where the answer is kept; whoever wants a question tried again removes it."""
        return self._directory / f"{question}.json"

    async def ask(self, question: str, find_out: Callable[[], Awaitable[Verdict]], **details: object) -> Verdict:
        """The verdict that is known, or the one that `find_out` comes to. Other `details` make it another question."""
        verdict = self.get(question, **details)
        if verdict is None:
            verdict = await find_out()
            self.keep(question, verdict, **details)
        return verdict

    def get(self, question: str, **details: object) -> Verdict | None:
        """What is known, if it was asked in the same circumstances."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # whatever is in the file, it can be asked anew
            known = json.loads(self.file(question).read_text())
            verdict = Verdict(**known["verdict"])
            age_s = time.time() - known["at"]
            if known["circumstances"] == _circumstances(details) and (not verdict.doubtful or 0 <= age_s < DOUBT_S):
                return verdict
        return None

    def keep(self, question: str, verdict: Verdict, **details: object) -> None:
        """Write a verdict down. One that cannot be kept is still a verdict, and no home is made for it: looking
        whether a host is usable leaves nothing behind."""
        text = json.dumps({"circumstances": _circumstances(details), "at": time.time(), "verdict": asdict(verdict)})
        file = self.file(question)
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(text)
            scratch.replace(file)


def _circumstances(details: dict[str, object]) -> dict[str, object]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "kernel": os.uname().release, "user": os.geteuid(), **details}
