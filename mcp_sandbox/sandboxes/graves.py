"""What is remembered of sandboxes that are over: how they ended, and what was written last where a machine was lost."""

from collections import OrderedDict
from dataclasses import replace

from mcp_sandbox.sandboxes.lifecycle import End, Ending

MAX_ENDINGS = 256  # ended sandboxes whose end can still be explained
MAX_LOST_RUNS = 16  # of them, those whose last run can still be read: a log takes up to a megabyte


class Graves:
    """The newest endings, by sandbox."""

    def __init__(self) -> None:
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    def add(self, ending: Ending) -> None:
        """Remember a sandbox, unless it never started: then nobody ever had it."""
        if ending.end is End.FAILED:
            return
        self._endings[ending.sandbox_id] = ending
        if len(self._endings) > MAX_ENDINGS:
            self._endings.popitem(last=False)
        lost = [ending for ending in self._endings.values() if ending.lost_run is not None]
        for old in lost[:-MAX_LOST_RUNS]:
            self._endings[old.sandbox_id] = replace(old, lost_run=None)

    def find(self, owner: str, sandbox_id: str) -> Ending | None:
        """How the owner's sandbox ended, if it did not too long ago."""
        ending = self._endings.get(sandbox_id)
        return ending if ending is not None and ending.owner == owner else None
