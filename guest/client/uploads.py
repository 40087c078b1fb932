"""Sending one file to a machine in parts: nothing is at its path before the last part has arrived."""

import secrets
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from guest.client import parsing
from guest.client.messages import FileInfo
from guest.errors import GuestError

# Half-sent files at once. The agent discards the oldest one beyond its own limit, and the rest of that file would
# then pass for a whole one; this is below that limit.
MAX_UPLOADS = 8

Ask = Callable[..., Awaitable[FileInfo | None]]  # `AgentClient._ask`


class Upload:
    """A file on its way. Get one from `AgentClient.upload`."""

    def __init__(self, path: str, ask: Ask, room: anyio.Semaphore, *, append: bool = False) -> None:
        self._path = path
        self._append = append  # to what is there, with the last part
        self._ask = ask
        self._room = room
        self._number = secrets.randbits(48)
        self._admitted = False  # holds a place among the half-sent files
        self._half_sent = False  # the agent has parts of it

    async def add(self, part: bytes) -> None:
        """Send a part of up to MAX_BODY bytes, and not the last one. The first waits while too many are half sent."""
        if not self._admitted:
            await self._room.acquire()
            self._admitted = True
        await self._send(part, last=False)

    async def finish(self, part: bytes) -> FileInfo:
        """Send the last part, and return the file."""
        info = await self._send(part, last=True)
        assert info is not None, "the agent describes the file after its last part"
        self._half_sent = False
        return info

    async def leave(self) -> None:
        """Have the agent discard a half-sent file."""
        try:
            if self._half_sent:
                with anyio.CancelScope(shield=True):
                    await self._ask("abandon", {"upload": self._number}, parse=_nothing)
        except GuestError:
            pass
        finally:
            if self._admitted:
                self._room.release()

    async def _send(self, part: bytes, *, last: bool) -> FileInfo | None:
        self._half_sent = self._admitted
        args = {"path": self._path, "upload": self._number, "last": last, "append": self._append}
        try:
            return await self._ask("write", args, part, parse=partial(parsing.parse_written, last=last))
        except GuestError:
            self._half_sent = False  # the agent discards what it refuses
            raise


def _nothing(_frame: object) -> None:
    """Parse an answer that carries nothing."""
