"""JSON-RPC messages of a client: each is read, or answered with an error.

On stdio the SDK drops what it cannot read without an answer, and the client waits for ever. Over HTTP it has two
parsers, which differ in what they take and in their errors.
"""

import json
import re
from typing import Any

from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    JSONRPCMessage,
    JSONRPCNotification,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError
from pydantic_core import from_json

from mcp_sandbox.serving.wire import END_BYTES

_ID = rb'"id"\s*:\s*(\d+|"[\w-]*")\s*'
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
_FIRST_ID = re.compile(rb"\s*\{\s*(?:" + _VERSION + rb",\s*)?" + _ID + rb",")
_LAST_ID = re.compile(rb"[}\]\"\w]\s*,\s*(?:" + _VERSION + rb",\s*)?" + _ID + rb"(?:,\s*" + _VERSION + rb")?\}\s*$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class InvalidMessage(Exception):
    """A line or body that is no message. `answer` is what its sender gets; empty if it waits for none."""

    def __init__(self, answer: str) -> None:
        super().__init__(answer)
        self.answer = answer


def parse_message(line: bytes) -> JSONRPCMessage:
    """Parse a line. Raises InvalidMessage."""
    return _parse(line)[0]


def checked_body(body: bytes) -> bytes:
    """Return the body of an HTTP request, if it is a message, as every JSON parser reads it. Raises InvalidMessage."""
    return _parse(body)[1]


def _parse(line: bytes) -> tuple[JSONRPCMessage, bytes]:
    """Return a message, and a line with the same content that has no unpaired surrogates."""
    try:
        content, readable = _parse_json(line)
    except ValueError as error:
        number = find_id(line[:END_BYTES], line[-END_BYTES:])
        raise InvalidMessage(_error(PARSE_ERROR, f"The message cannot be read as JSON: {error}.", number)) from error
    try:
        message = jsonrpc_message_adapter.validate_python(content, by_name=False)
    except ValidationError as error:
        raise InvalidMessage(_invalid_request(content)) from error
    if isinstance(message, JSONRPCNotification) and "id" in content:  # its sender waits for an answer
        raise InvalidMessage(_invalid_request(content))
    return message, readable


def _parse_json(line: bytes) -> tuple[Any, bytes]:
    """Return the JSON in a line, and the line that was parsed. Raises ValueError.

    JSON can escape an unpaired surrogate, which UTF-8 cannot encode. Each one becomes a question mark.
    """
    try:
        return from_json(line, allow_inf_nan=False), line
    except ValueError:
        if not _SURROGATE.search(line):
            raise
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return from_json(text, allow_inf_nan=False), text


def too_long(start: bytes, end: bytes, max_bytes: int) -> str:
    """Return the answer to a message of which only the ends were kept."""
    message = (
        f"The message is longer than {max_bytes:,} bytes and was not read. Send large files in parts with "
        "write_file(append=true), or let code in the sandbox create them."
    )
    return _error(INVALID_REQUEST, message, find_id(start, end))


def find_id(start: bytes, end: bytes) -> int | str | None:
    """Return the id of a message that was not read.

    It is found if it is the first or last member besides the version, which is where clients put it.
    """
    found = _FIRST_ID.match(start) or _LAST_ID.search(end)
    number: int | str | None = json.loads(found[1]) if found else None
    return number


def _invalid_request(content: Any) -> str:  # noqa: ANN401 - JSON
    """Return the answer to JSON that is no message."""
    if not isinstance(content, dict):
        what = "A message is one JSON object; batches are not supported."
        return _error(INVALID_REQUEST, what, None)
    if "method" not in content and content.keys() & {"result", "error"}:
        return ""  # an invalid answer: an error with its id would be taken for ours
    number = content.get("id")
    known = number if isinstance(number, int | str) and not isinstance(number, bool) else None
    what = 'The message is no JSON-RPC request: it needs "jsonrpc": "2.0", a method, params that are an object if any, '
    return _error(INVALID_REQUEST, f"{what}and an id that is a whole number or a string.", known)


def _error(code: int, message: str, number: int | str | None) -> str:
    error = {"code": code, "message": message}
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": error}) + "\n"
