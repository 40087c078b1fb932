"""The answer to `initialize`, which a client waits for before it does anything else.

The SDK takes most of a server's start to import. So an ordinary `initialize` is answered before; the SDK gets it as
well, and its answer, which is the same, is dropped. Anything else waits for the SDK.
"""

from importlib.metadata import version

import anyio

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.early import EarlyGreeting
from mcp_sandbox.serving.initialize import NAME, answer_to, parse_initialize
from mcp_sandbox.tools.descriptions import lifetime_of, network_of
from vmm.errors import DriverUnavailable


def instructions(settings: Settings, isolation: str) -> str:
    """Describe the whole server to a client. `isolation` is what separates sandboxes from this host."""
    return (
        f"Runs code in isolated sandboxes. Isolation level in force: {isolation}. "
        f"{network_of(settings)} "
        "create_sandbox returns a sandbox_id; files and, in Python, variables persist across calls that name it. "
        f"{lifetime_of(settings)}. run_code and run_command without sandbox_id keep nothing. "
        f"Code starts in {WORKSPACE}; files it leaves in {OUTPUTS} are artifacts, which read_artifact reads. "
        f"A run may take {settings.runs.timeout_s:g} s, or timeout_s, at most {settings.runs.max_timeout_s:g} s."
    )


class Greeting:
    """Whether the SDK is there yet, and what was answered before."""

    def __init__(self, early: EarlyGreeting | None = None) -> None:
        self.early = early or EarlyGreeting()
        self.sdk_ready = anyio.Event()  # it can take messages
        self._instructions: str | None = None
        self._known = anyio.Event()  # the instructions are, or are not needed any more
        self._answered = self.early.answered

    def prepare(self, instructions: str) -> None:
        """Answer with these instructions until the SDK is ready.

        Raises:
            DriverUnavailable: the client was told something else, which was true when a server started last.
        """
        if self.early.told not in (None, instructions):
            self.early.forget()
            message = (
                "the client was told what is not true any more, because this host has changed since the last start"
            )
            raise DriverUnavailable(message, fix="start the server again")
        self._instructions = instructions
        self._known.set()

    def hand_over(self) -> None:
        """Leave all messages to the SDK from now on."""
        self.sdk_ready.set()
        self._known.set()

    async def answer(self, line: bytes) -> str | None:
        """Return the answer to the client's first line, unless it was given before or the SDK has to give it."""
        if self._answered is not None:
            return None
        await self._known.wait()
        if self.sdk_ready.is_set() or self._instructions is None:
            return None
        request = parse_initialize(line)
        if request is None:
            return None
        self._answered = request["id"]
        return answer_to(request, self._instructions, version(NAME))

    def was_answered(self, number: object) -> bool:
        """Whether the request that the SDK answers now was answered before. Tells so once."""
        answered = self._answered is not None and number == self._answered
        if answered:
            self._answered = None
        return answered
