"""Captures the output of a run: the head is sent live, the tail at the end, everything goes to a file."""

import os
from collections.abc import Callable

MAX_SPILL = 128 * 1024 * 1024  # bytes of one stream in a file; more could fill the machine's disk
TRIM_BYTES = 256 * 1024  # how much the tail may grow before it is trimmed


class Capture:
    """One stream of one run.

    The first `head` bytes are sent as they come and the last `tail` bytes at the end. If that leaves something out,
    everything is written to a spill file, as far as there is room. The total is always right.
    """

    def __init__(
        self, head: int, tail: int, send: Callable[[bytes, int], None], open_spill: Callable[[], tuple[int, str]]
    ) -> None:
        self.total = 0
        self.spilled: str | None = None  # path of the spill file
        self.complete = True  # the spill file, if there is one, holds everything
        self._head_left = head
        self._tail_size = tail
        self._send = send
        self._open_spill = open_spill
        self._spill_fd = -1
        self._spill_left = MAX_SPILL
        self._head = bytearray()  # for the spill file
        self._tail = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        """Add what the code wrote."""
        self.total += len(data)
        if self._head_left:
            live, data = data[: self._head_left], data[self._head_left :]
            self._head_left -= len(live)
            self._head += live
            self._send(live, 0)
        if not data:
            return
        if self._spill_fd >= 0:
            self._spill(data)
        elif self.complete and len(self._tail) + len(data) > self._tail_size:
            self._start_spill(data)
        self._tail += data
        if len(self._tail) > self._tail_size + TRIM_BYTES:
            self._trim()

    def finish(self) -> None:
        """Send the tail and close the spill file."""
        self._trim()
        if self._tail or self._left_out:
            self._send(bytes(self._tail), self._left_out)
        if self._spill_fd >= 0:
            os.close(self._spill_fd)
            self._spill_fd = -1

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_size
        if excess > 0:
            del self._tail[:excess]
            self._left_out += excess

    def _start_spill(self, data: bytes) -> None:
        try:
            self._spill_fd, self.spilled = self._open_spill()
        except OSError:
            self.complete = False
            return
        for part in (bytes(self._head), bytes(self._tail), data):
            self._spill(part)
        self._head.clear()

    def _spill(self, data: bytes) -> None:
        """Write to the file until it or the disk is full."""
        part = memoryview(data)[: self._spill_left]
        self._spill_left -= len(part)
        try:
            while part and self._spill_fd >= 0:
                part = part[os.write(self._spill_fd, part) :]
        except OSError:
            self._spill_left = 0
        if self._spill_left == 0 and self._spill_fd >= 0:
            self.complete = False
            os.close(self._spill_fd)
            self._spill_fd = -1
