"""Messages on stdin: memory stays bounded and the client always gets an answer."""

import json
import os
from collections.abc import Iterator

import anyio
import pytest

from mcp_sandbox.serving.stdio import END_BYTES, LineReader, refusal

MAX = 1000


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
        lines.append(refusal(start, end, MAX))

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
                lines += [line]  # in their place among the refusals
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


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"half \ud800 of a pair", "half ? of a pair"),
        (r"the other \uDC00 half", "the other ? half"),
        (r"\ud83d\ude00 whole", "\U0001f600 whole"),
        (r"\\ud800 is a backslash and letters", r"\ud800 is a backslash and letters"),
    ],
)
async def test_a_message_with_an_unpaired_surrogate_arrives_as_text(pipe: tuple[int, int], sent: str, read: str):
    (line,) = await read_all(pipe, b'{"id":1,"code":"%s"}\n' % sent.encode())
    assert json.loads(line) == {"id": 1, "code": read}


async def test_a_message_that_is_not_json_is_passed_on_unchanged(pipe: tuple[int, int]):
    assert await read_all(pipe, b'{"id":\\ud800\n') == ['{"id":\\ud800\n']
