"""The answer to `initialize`, which a client waits for before it does anything else.

The SDK takes most of a server's start to import. So an ordinary `initialize` is answered before; the SDK gets it as
well, and its answer, which is the same, is dropped. Anything else waits for the SDK.
"""

import anyio

from mcp_sandbox.serving.early import EarlyGreeting
from mcp_sandbox.serving.initialize import answer_to, parse_initialize


class Greeting:
    """Whether the SDK is there yet, and what was answered before."""

    def __init__(self, early: EarlyGreeting | None = None) -> None:
        self.early = early or EarlyGreeting()
        self.sdk_ready = anyio.Event()  # it can take messages
        self._answered = self.early.answered

    def answer(self, line: bytes) -> str | None:
        """Return the answer to the client's first line, unless it was given before or the SDK has to give it."""
        if self._answered is not None or self.sdk_ready.is_set():
            return None
        request = parse_initialize(line)
        if request is None:
            return None
        self._answered = request["id"]
        return answer_to(request)

    def was_answered(self, number: object) -> bool:
        """Return whether the request that the SDK answers now was answered before; only its first answer is dropped."""
        answered = self._answered is not None and number == self._answered
        if answered:
            self._answered = None
        return answered
