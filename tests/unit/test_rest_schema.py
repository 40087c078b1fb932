"""Whatever requests schemathesis makes of the OpenAPI document, the answers are as the document says."""

import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import hypothesis
import pytest
import requests
import schemathesis
import uvicorn
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from mcp_sandbox.config import Settings
from mcp_sandbox.rest.app import OPERATIONS
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.rest.openapi import document
from tests.unit import test_fetch_tool, test_web_search
from tests.unit.fakes import TEMPLATE, FakeProvider
from tests.unit.rest_client import rest_over
from tests.waiting import HANG_S
from websearch.access import Caller
from websearch.jobs import Answer, Jobs

SETTINGS = Settings(
    toolsets=["advanced"],
    limits={"sandboxes": 3, "queue_timeout_s": 0.01},
    web={"brave_key": "x", "providers": ["brave"]},
)
EXAMPLES = 6  # of each operation
LIVE = {"sandbox_id": "live", "run_id": "live", "artifact_id": "live"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


class Internet:
    """Jobs that find one page and fetch every page."""

    def __init__(self) -> None:
        self._jobs: dict[str, Jobs] = {
            "search": test_web_search.FakeJobs(brave={"results": [test_web_search.page(1)]}),
            "fetch": test_fetch_tool.FakeJobs(),
        }

    async def run(self, kind: str, fields: Mapping[str, Any], *, caller: Caller, timeout_s: float) -> Answer:
        return await self._jobs[kind].run(kind, fields, caller=caller, timeout_s=timeout_s)


async def serve(listener: socket.socket, stop: anyio.Event) -> None:
    async with rest_over(FakeProvider(), SETTINGS, Internet()) as app:
        web = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(web._serve, [listener])
            await stop.wait()
            web.should_exit = True


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.from_thread.start_blocking_portal() as portal:
        stop = portal.call(anyio.Event)
        served = portal.start_task_soon(serve, listener, stop)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}{ROOT}"
        finally:
            portal.call(stop.set)
            served.result()


def described() -> dict[str, Any]:
    """The document without idempotency keys, which hide answers, and with ids and templates that there are."""
    found = document(OPERATIONS)
    for operation in (operation for there in found["paths"].values() for operation in there.values()):
        operation["parameters"] = [given for given in operation["parameters"] if given["name"] != "Idempotency-Key"]
        for parameter in operation["parameters"]:
            if parameter["in"] == "path":
                parameter["schema"] = {"enum": [LIVE[parameter["name"]]]}
    for schema in found["components"]["schemas"].values():
        if schema.get("properties", {}).get("template", {}).get("default", "") is None:
            schema["properties"]["template"] = {"enum": [None, TEMPLATE]}
    return found


def live_box(address: str) -> str:
    """The id of a sandbox."""
    boxes = requests.get(f"{address}/sandboxes", timeout=HANG_S).json()["sandboxes"]
    found = boxes[-1] if boxes else requests.post(f"{address}/sandboxes", timeout=HANG_S).json()
    return str(found["sandbox_id"])


def live_run(address: str, sandbox_id: str) -> str:
    """The id of a new run."""
    runs = f"{address}/sandboxes/{sandbox_id}/runs"
    started = requests.post(runs, json={"code": "1", "background": True}, timeout=HANG_S)
    return str(started.json().get("run_id", "none"))


def live_artifact(address: str) -> str:
    """The id of what does not fit into an answer."""
    page = requests.post(f"{address}/web/fetch", json={"url": test_fetch_tool.URL, "max_chars": 1}, timeout=HANG_S)
    return str(urlsplit(page.json()["artifact"]["uri"]).hostname)


SCHEMA = schemathesis.openapi.from_dict(described()).exclude(operation_id="run_once")  # it takes what `run` takes


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
def test_every_answer_is_as_the_document_says(case: schemathesis.Case[Any], address: str):
    named = case.path_parameters
    if named.get("sandbox_id") == LIVE["sandbox_id"]:
        named["sandbox_id"] = live_box(address)
        if named.get("run_id") == LIVE["run_id"]:
            named["run_id"] = live_run(address, named["sandbox_id"])
    if named.get("artifact_id") == LIVE["artifact_id"]:
        named["artifact_id"] = live_artifact(address)
    case.call_and_validate(base_url=address, checks=CHECKS, timeout=HANG_S)
