"""What a gVisor machine takes of the host's memory."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MEMORY_FILE = "/memfd:runsc-memory (deleted)"
BLOCK_BYTES = 512  # what st_blocks counts in
ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


class Sentry(NamedTuple):
    """The process that is a machine's kernel, and the file in which it keeps all memory of the machine."""

    pid: int
    memory_file: Path

    def used_bytes(self, _enough: int) -> int:
        """Return what both take from the host. Raises OSError if the process has ended."""
        own = ANONYMOUS.search(Path(f"/proc/{self.pid}/status").read_text())
        return file_bytes(self.memory_file) + (int(own[1]) * 1024 if own else 0)


def find_sentry(pids: Iterable[int]) -> Sentry | None:
    """Return the sentry, if it is one of these processes."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it has just been closed
                    if str(link.readlink()) == MEMORY_FILE:
                        return Sentry(pid, link)
    return None


def file_bytes(path: Path) -> int:
    """Return how much of a file there is; most of the memory file is empty."""
    return path.stat().st_blocks * BLOCK_BYTES
