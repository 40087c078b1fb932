"""The request `initialize`, read and answered without the SDK. Nothing that takes long is imported here."""

import json
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from guest.places import OUTPUTS, WORKSPACE

NAME = "mcp-sandbox"
TITLE = "Sandboxes for code"
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")  # of the protocol, with this handshake
MAX_ID = 2**53  # what every JSON parser reads exactly
MORE_ABOUT_CLIENT = ("title", "description", "websiteUrl")
# The same on every host and with all settings, so that nothing has to be read before the answer. What depends on them
# is in the descriptions of the tools.
INSTRUCTIONS = (
    "Runs code in isolated sandboxes, which are offline by default. create_sandbox says which isolation is in force "
    "and returns a sandbox_id; files and, in Python, variables persist across calls that name it. "
    "run_code and run_command without sandbox_id keep nothing. "
    f"Code starts in {WORKSPACE}; files it leaves in {OUTPUTS} are artifacts, which read_artifact reads."
)
CAPABILITIES = {
    "prompts": {"listChanged": False},
    "resources": {"listChanged": False, "subscribe": False},
    "tools": {"listChanged": False},
}


def answer_to(request: dict[str, Any]) -> str:
    """Return the line that answers an ordinary `initialize`."""
    result = {
        "capabilities": CAPABILITIES,
        "instructions": INSTRUCTIONS,
        "protocolVersion": request["params"]["protocolVersion"],
        "serverInfo": {"name": NAME, "title": TITLE, "version": version(NAME)},
    }
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n"


def parse_initialize(line: bytes) -> dict[str, Any] | None:
    """Return an `initialize` that the SDK is sure to accept, and to answer with the version it asks for; or None."""
    with suppress(ValueError, RecursionError):
        return _ordinary(json.loads(line.decode()))  # from bytes it would also read UTF-16
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
