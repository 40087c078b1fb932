"""Results of slow probes of this host, cached until it reboots."""

import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

DOUBT_S = 3600.0  # a probe that failed perhaps because the host was busy is repeated after an hour


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe."""

    usable: bool | None  # None: it could not be tried
    reason: str
    fix: str | None = None  # what would help
    doubtful: bool = False  # it timed out or was killed: on a less busy host the result may differ


class Verdicts:
    """A directory of verdicts, one file per question. They are valid for one boot, kernel and user."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def file(self, question: str) -> Path:
        """Return the file of a verdict. Removing it repeats the probe."""
        return self._directory / f"{question}.json"

    async def ask(self, question: str, find_out: Callable[[], Awaitable[Verdict]], **details: object) -> Verdict:
        """Return the cached verdict, or the one that `find_out` returns. A verdict with other `details` is stale."""
        verdict = self.get(question, **details)
        if verdict is None:
            verdict = await find_out()
            self.keep(question, verdict, **details)
        return verdict

    def get(self, question: str, **details: object) -> Verdict | None:
        """Return the cached verdict, or None if there is none or it is stale."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file only costs another probe
            known = json.loads(self.file(question).read_text())
            verdict = Verdict(**known["verdict"])
            age_s = time.time() - known["at"]
            if known["circumstances"] == _circumstances(details) and (not verdict.doubtful or 0 <= age_s < DOUBT_S):
                return verdict
        return None

    def keep(self, question: str, verdict: Verdict, **details: object) -> None:
        """Cache a verdict if possible. The home is not created for it: probing a host leaves nothing behind."""
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
