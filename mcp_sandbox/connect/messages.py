"""JSON-RPC messages on their way from a client's stdin to an HTTP server."""

import base64
import json
from dataclasses import dataclass
from typing import Any

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
SERVER_ERROR = -32000  # the first of those that JSON-RPC leaves to servers
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
# What a 2026-07-28 request names in its Mcp-Name header.
NAMED = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}


class NoMessage(Exception):
    """A line that is no JSON-RPC message. `answer` is what its sender gets."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the client."""

    line: bytes
    method: str | None  # None: an answer to a request of the server
    id: int | str | None  # None: nothing comes back
    params: dict[str, Any]

    @property
    def stateless(self) -> str | None:
        """The protocol version of a request of 2026-07-28 or later; earlier ones belong to a session."""
        meta = self.params.get("_meta")
        version = meta.get(VERSION_KEY) if isinstance(meta, dict) else None
        return version if isinstance(version, str) else None

    @property
    def headers(self) -> dict[str, str]:
        """What a stateless request repeats in its headers."""
        if self.stateless is None:
            return {}
        name = self.params.get(NAMED.get(self.method or "", ""))
        named = {"Mcp-Name": _header_value(name)} if isinstance(name, str) else {}
        return {"MCP-Protocol-Version": self.stateless, "Mcp-Method": self.method or "", **named}


def parse(line: bytes) -> Message:
    """Return the message in a line. Raises NoMessage."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoMessage(error_message(None, PARSE_ERROR, f"The message cannot be read as JSON: {error}.")) from error
    if not isinstance(content, dict):
        raise NoMessage(error_message(None, INVALID_REQUEST, "A message is one JSON object."))
    method, params, number = (content.get(name) for name in ("method", "params", "id"))
    return Message(
        line.strip(),
        method if isinstance(method, str) else None,
        number if isinstance(method, str) and isinstance(number, int | str) else None,
        params if isinstance(params, dict) else {},
    )


def answers(data: bytes, number: int | str | None) -> bool:
    """Return whether a message of the server is the answer to request `number`."""
    message = json.loads(data)
    return "method" not in message and message.get("id") == number


def error_message(number: int | str | None, code: int, text: str) -> bytes:
    """Return an answer that is an error."""
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}).encode()


def refusal(number: int | str | None, status: int, body: bytes) -> bytes:
    """Return the answer to a request that an HTTP server refused: its own error if it sent one."""
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if isinstance(content, dict) and isinstance(content.get("error"), dict):
        return json.dumps({"jsonrpc": "2.0", "id": number, "error": content["error"]}).encode()
    why = content.get("title") if isinstance(content, dict) else None
    return error_message(number, SERVER_ERROR, f"The server refused the request ({status}): {why or 'no reason given'}")


def _header_value(text: str) -> str:
    """Return text as the value of a header, which only has printable ASCII."""
    if text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="
