"""Messages on stdin: memory stays bounded, and the client always gets an answer."""

import json
import os
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import INVALID_REQUEST, PARSE_ERROR, JSONRPCRequest

from mcp_sandbox.serving.messages import InvalidMessage, parse_message, too_long
from mcp_sandbox.serving.wire import END_BYTES, LineReader
from tests.unit.json_values import JSON

MAX = 1000
MEMBERS = st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error"])
JSON_LINES = st.dictionaries(MEMBERS, JSON | st.floats() | st.just("2.0")).map(lambda value: json.dumps(value).encode())


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)


async def read_all(pipe: tuple[int, int], data: bytes) -> list[str]:
    """Return the lines that pass, with refusals in their place."""
    lines: list[str] = []

    async def refuse(start: bytes, end: bytes) -> None:
        assert max(len(start), len(end)) <= END_BYTES
        lines.append(too_long(start, end, MAX))

    async def send() -> None:
        rest = memoryview(data)
        while rest:
            await anyio.wait_writable(pipe[1])
            rest = rest[os.write(pipe[1], rest[:4096]) :]
        os.close(pipe[1])

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            async for line in LineReader(pipe[0], MAX, refuse):
                lines += [line.decode()]  # in their place among the refusals
    return lines


@pytest.mark.parametrize("size", [MAX + 1, 500_000])
@pytest.mark.parametrize(
    ("message", "number"),
    [
        ('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"x":"%s"}}', 7),
        ('{"method":"tools/call","params":{"x":"%s"},"jsonrpc":"2.0","id":"a-1"}', "a-1"),
        ('{"method": "x", "params": {"x": "%s"}, "id": 3, "jsonrpc": "2.0"}', 3),
        ('{"method":"x","params":{"x":"%s","id":5}}', None),
        ('{"params":{"id":5,"x":"%s"}}', None),
        ('{"params":"%s\\",\\"id\\":5}"}', None),
    ],
)
async def test_a_message_that_is_too_long_is_refused_under_its_own_id_and_the_next_is_read(
    pipe: tuple[int, int], message: str, number: object, size: int
):
    first, refused, last = await read_all(pipe, b"first\n" + (message % ("x" * size)).encode() + b"\nlast\n")
    assert (first, last) == ("first\n", "last\n")
    answer = json.loads(refused)
    assert answer["id"] == number
    assert "longer than 1,000 bytes" in answer["error"]["message"]


async def test_a_message_of_exactly_the_limit_is_read(pipe: tuple[int, int]):
    lines = await read_all(pipe, b"x" * (MAX - 1) + b"\nend without newline")
    assert [len(line) for line in lines] == [MAX, 19]


def refused(line: bytes) -> dict[str, Any]:
    with pytest.raises(InvalidMessage) as caught:
        parse_message(line)
    answer: dict[str, Any] = json.loads(caught.value.answer)
    assert answer["jsonrpc"] == "2.0"
    assert len(caught.value.answer) < 1000
    return answer


def request(**more: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", **more}).encode()


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"half \ud800 of a pair", "half ? of a pair"),
        (rb"the other \uDC00 half", "the other ? half"),
        (rb"\ud83d\ude00 whole", "\U0001f600 whole"),
        (rb"\\ud800 is a backslash and letters", r"\ud800 is a backslash and letters"),
    ],
)
def test_a_message_with_an_unpaired_surrogate_arrives_as_text(sent: bytes, read: str):
    message = parse_message(request(params={"code": "CODE"}).replace(b"CODE", sent))
    assert isinstance(message, JSONRPCRequest)
    assert message.params == {"code": read}


UNREADABLE = {
    "nothing": b"",
    "half a message": b'{"jsonrpc":"2.0",',
    "deep nesting": request(params={"x": "DEEP"}).replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000),
    "deep nesting and half a surrogate pair": request(params={"s": "HALF", "x": "DEEP"})
    .replace(b"HALF", rb"\ud800")
    .replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000),
    "an integer of 100,000 digits": request(params={"x": 0}).replace(b"0}", b"9" * 100_000 + b"}"),
    "not a number": request(params={"x": float("nan")}),
    "infinity": request(params={"x": float("-inf")}),
    "invalid UTF-8": request(params={"x": "?"}).replace(b"?", b"\xff"),
    "UTF-16": request().decode().encode("utf-16"),
    "two messages": request() + request(),
    "a null byte": request() + b"\0",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_json_is_a_parse_error(name: str):
    answer = refused(UNREADABLE[name])
    assert answer["error"]["code"] == PARSE_ERROR
    assert answer["id"] in (None, 7)
    assert (answer["id"] == 7) is UNREADABLE[name].startswith(b'{"jsonrpc": "2.0", "id": 7,')


INVALID: dict[str, tuple[bytes, object]] = {
    "a batch": (b"[" + request() + b"]", None),
    "an empty batch": (b"[]", None),
    "a string": (b'"tools/call"', None),
    "a number": (b"1", None),
    "null": (b"null", None),
    "an empty object": (b"{}", None),
    "no version": (b'{"id":7,"method":"x"}', 7),
    "another version": (request(jsonrpc="1.0"), 7),
    "a method that is a number": (request(method=5), 7),
    "params that are a list": (request(params=[1]), 7),
    "an id that is null": (request(id=None), None),
    "an id that is a fraction": (request(id=1.5), None),
    "an id that is true": (request(id=True), None),
    "an id that is an object": (request(id={}), None),
}


@pytest.mark.parametrize("name", INVALID)
def test_json_that_is_no_request_is_an_invalid_request(name: str):
    line, number = INVALID[name]
    answer = refused(line)
    assert answer["error"]["code"] == INVALID_REQUEST
    assert answer["id"] == number


def test_an_invalid_answer_of_the_client_is_not_answered():
    for line in (b'{"jsonrpc":"2.0","id":{},"result":{}}', b'{"jsonrpc":"2.0","id":1,"error":5}'):
        with pytest.raises(InvalidMessage) as caught:
            parse_message(line)
        assert caught.value.answer == ""


@pytest.mark.parametrize("number", [0, -1, 10**300, "", "x" * 100_000, "\u2028"])
def test_every_id_that_json_rpc_allows_is_passed_on(number: object):
    message = parse_message(request(id=number))
    assert isinstance(message, JSONRPCRequest)
    assert message.id == number


def test_the_last_of_several_members_with_one_name_counts():
    message = parse_message(b'{"jsonrpc":"2.0","id":1,"method":"a","method":"b"}')
    assert isinstance(message, JSONRPCRequest)
    assert message.method == "b"


@given(st.binary(max_size=300) | JSON_LINES)
def test_any_line_is_a_message_or_gets_one_line_of_answer(line: bytes):
    try:
        parse_message(line)
    except InvalidMessage as invalid:
        answer = invalid.answer
        assert answer == "" or (answer.count("\n") == 1 and answer.endswith("\n"))
        if answer:
            assert json.loads(answer)["error"]["code"] in (PARSE_ERROR, INVALID_REQUEST)
