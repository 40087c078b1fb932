"""The answer to `initialize`, which a client waits for before it does anything else.

The SDK takes most of a server's start to import. So an ordinary `initialize` is answered before; the SDK gets it as
well, and its answer, which is the same, is dropped. Anything else waits for the SDK.
"""

import json
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import anyio

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.tools.descriptions import lifetime_of, network_of

NAME = "mcp-sandbox"
TITLE = "Sandboxes for code"
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")  # of the protocol, with this handshake
MAX_ID = 2**53  # what every JSON parser reads exactly
MORE_ABOUT_CLIENT = ("title", "description", "websiteUrl")
CAPABILITIES = {
    "prompts": {"listChanged": False},
    "resources": {"listChanged": False, "subscribe": False},
    "tools": {"listChanged": False},
}


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

    def __init__(self) -> None:
        self.sdk_ready = anyio.Event()  # it can take messages
        self._instructions: str | None = None
        self._known = anyio.Event()  # the instructions are, or are not needed any more
        self._answered: int | str | None = None

    def prepare(self, instructions: str) -> None:
        """Answer with these instructions until the SDK is ready."""
        self._instructions = instructions
        self._known.set()

    def hand_over(self) -> None:
        """Leave all messages to the SDK from now on."""
        self.sdk_ready.set()
        self._known.set()

    async def answer(self, line: bytes) -> str | None:
        """Return the answer to the client's first line, unless the SDK has to give it."""
        await self._known.wait()
        if self.sdk_ready.is_set() or self._instructions is None:
            return None
        request = parse_initialize(line)
        if request is None:
            return None
        self._answered = request["id"]
        result = {
            "capabilities": CAPABILITIES,
            "instructions": self._instructions,
            "protocolVersion": request["params"]["protocolVersion"],
            "serverInfo": {"name": NAME, "title": TITLE, "version": version(NAME)},
        }
        return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n"

    def was_answered(self, number: object) -> bool:
        """Whether the request that the SDK answers now was answered before. Tells so once."""
        answered = self._answered is not None and number == self._answered
        if answered:
            self._answered = None
        return answered


def parse_initialize(line: bytes) -> dict[str, Any] | None:
    """Return an `initialize` that the SDK is sure to accept, and to answer with the version it asks for; or None."""
    with suppress(ValueError, RecursionError):
        return _ordinary(json.loads(line))
    return None


def _ordinary(message: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any JSON
    match message:
        case {
            "jsonrpc": "2.0",
            "id": number,
            "method": "initialize",
            "params": {"protocolVersion": str(wanted), "capabilities": dict(capabilities), "clientInfo": dict(client)},
        } if (
            message.keys() == {"jsonrpc", "id", "method", "params"}
            and message["params"].keys() == {"protocolVersion", "capabilities", "clientInfo"}
            and ((type(number) is int and abs(number) < MAX_ID) or (type(number) is str and number.isascii()))
            and wanted in VERSIONS
            and _is_plain(capabilities)
            and {"name", "version"} <= client.keys() <= {"name", "version", *MORE_ABOUT_CLIENT}
            and all(type(value) is str for value in client.values())
        ):
            return dict(message)
    return None


def _is_plain(capabilities: dict[str, Any]) -> bool:
    """Whether these are objects all the way down, but for the only flag that the protocol has."""
    return all(
        type(value) is bool if name == "listChanged" else isinstance(value, dict) and _is_plain(value)
        for name, value in capabilities.items()
    )
