"""Every log record about a sandbox carries its id, as text and as JSON."""

import io
import json
import logging
from collections.abc import Iterator

import anyio
import pytest

from mcp_sandbox import logs

logger = logging.getLogger("a.module")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # `configure` would close them
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_every_line_logged_for_a_sandbox_has_its_id(stream: io.StringIO):
    logs.configure("INFO", "json", stream)

    async def in_a_task() -> None:
        logger.info("in a task")

    with logs.about("sb-1"):
        logger.info("in the block")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(in_a_task)
    logger.info("afterwards")
    logger.info("by hand", extra={"sandbox": "sb-2"})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["message"], line.get("sandbox")) for line in lines] == [
        ("in the block", "sb-1"),
        ("in a task", "sb-1"),
        ("afterwards", None),
        ("by hand", "sb-2"),
    ]


def test_a_json_record_is_one_line_even_with_a_traceback(stream: io.StringIO):
    logs.configure("WARNING", "json", stream)
    logger.info("below the level")
    logger.warning("bad\nthing: %s", "ü", exc_info=ValueError('"quoted"\nand broken'))
    [line] = stream.getvalue().splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("WARNING", "a.module", "bad\nthing: ü")
    assert 'ValueError: "quoted"' in record["error"]
    assert record["time"].endswith("+00:00")


def test_a_text_line_names_the_sandbox_once(stream: io.StringIO):
    logs.configure("INFO", "text", stream)
    with logs.about("sb-1"):
        logger.info("restored")
        logger.info("sandbox sb-1 ended")
    logger.info("stopping")
    assert stream.getvalue().splitlines() == [
        "INFO a.module: restored [sb-1]",
        "INFO a.module: sandbox sb-1 ended",
        "INFO a.module: stopping",
    ]
