"""What was fetched and does not fit into an answer: artifacts without a sandbox, kept for their owners for a while."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mcp_sandbox.errors import ArtifactNotFound
from mcp_sandbox.views import ArtifactView, mime_of

MAX_ARTIFACTS = 64  # of one owner
OWNERS = 4  # that can use all their bytes at the same time; beyond that, the largest one loses its oldest


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of a download, or the whole text of a page."""

    url: str
    name: str
    data: bytes
    is_text: bool  # as a worker read it, in UTF-8

    @property
    def id(self) -> str:
        """The same for the same page, whoever fetched it: it says nothing about other owners."""
        return hashlib.sha256(f"{self.url}\n{self.name}".encode()).hexdigest()[:16]

    @property
    def view(self) -> ArtifactView:
        """What callers see of it."""
        uri = f"web://{self.id}/{self.name}"
        return ArtifactView(path=self.name, size=len(self.data), mime_type=mime_of(self.name), uri=uri)


@dataclass(slots=True)
class _Shelf:
    """The artifacts of one owner with the time of their end, the oldest first."""

    kept: OrderedDict[str, tuple[float, Artifact]] = field(default_factory=OrderedDict)
    bytes: int = 0

    def drop(self, artifact_id: str) -> None:
        self.bytes -= len(self.kept.pop(artifact_id)[1].data)

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.kept)))

    @property
    def oldest_end(self) -> float:
        return next(iter(self.kept.values()))[0]


class WebArtifacts:
    """Artifacts of many owners: each has its own, up to a number, a size and an age."""

    def __init__(self, ttl_s: float, owner_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._owner_bytes = owner_bytes
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    @property
    def bytes(self) -> int:
        """That all artifacts take."""
        return sum(shelf.bytes for shelf in self._shelves.values())

    def put(self, owner: str, artifact: Artifact) -> bool:
        """Keep an artifact instead of older ones; returns whether there is room for one of its size."""
        if self._ttl_s <= 0 or len(artifact.data) > self._owner_bytes:
            return False
        self._drop_expired()
        shelf = self._shelves.setdefault(owner, _Shelf())
        if artifact.id in shelf.kept:
            shelf.drop(artifact.id)
        shelf.kept[artifact.id] = (self._clock() + self._ttl_s, artifact)
        shelf.bytes += len(artifact.data)
        while shelf.bytes > self._owner_bytes or len(shelf.kept) > MAX_ARTIFACTS:
            shelf.drop_oldest()
        while self.bytes > OWNERS * self._owner_bytes:
            max(self._shelves.values(), key=lambda each: each.bytes).drop_oldest()
        return artifact.id in shelf.kept

    def get(self, owner: str, artifact_id: str) -> Artifact:
        """Return an artifact of an owner. Raises ArtifactNotFound."""
        self._drop_expired()
        shelf = self._shelves.get(owner, _Shelf())
        if artifact_id not in shelf.kept:
            raise ArtifactNotFound(artifact_id)
        return shelf.kept[artifact_id][1]

    def _drop_expired(self) -> None:
        now = self._clock()
        for owner, shelf in list(self._shelves.items()):
            while shelf.kept and shelf.oldest_end <= now:
                shelf.drop_oldest()
            if not shelf.kept:
                del self._shelves[owner]
