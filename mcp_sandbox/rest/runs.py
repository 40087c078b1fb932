"""Operations on runs: start, send input, follow, stop."""

import re
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from mcp_sandbox.errors import BadRequest, InputTooLarge, SandboxError
from mcp_sandbox.rest.bodies import EventsQuery, InputQuery, Nothing, OutputQuery, RunBody
from mcp_sandbox.rest.files import received
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.rest.operations import Call, Operation, answered
from mcp_sandbox.rest.problems import problem_of
from mcp_sandbox.views import RunProgress, RunView, SentInput

PING_S = 15  # between signs of life: proxies close connections that are silent
LOOK_S = 30.0  # how long one look for more output waits; it also shows that the sandbox is in use
MAX_INPUT_BYTES = 1 << 20  # of one request
LAST_EVENT = "end"  # the id of the event after which nothing comes
OFFSET = re.compile(r"[0-9]{1,18}")
TOOLS = {"code": "run_code", "command": "run_command", "invoke": "invoke_handler"}  # by the kind of a run


async def start(call: Call[Nothing, RunBody]) -> Response:
    """Answer with the result, or with the run that goes on in the background."""
    sandbox_id = call.request.path_params.get("sandbox_id")
    body = call.body.root
    if TOOLS[body.kind] not in call.tools:
        raise BadRequest(f"This server does not offer runs of the kind {body.kind!r}.")
    run = await call.service.run_for_client(body.request(call.owner, sandbox_id), background=body.background)
    if isinstance(run, RunView):
        return answered(run)
    return answered(run, 202, f"{ROOT}/sandboxes/{run.sandbox_id}/runs/{run.run_id}")


async def get(call: Call[OutputQuery, Nothing]) -> Response:
    """Answer with a part of the output, and with the result if the run is over."""
    wait_s = min(call.query.wait_s, call.service.settings.runs.foreground_s)
    return answered(
        await call.service.read_output(
            call.owner, call.sandbox_id, call.run_id, offset=call.query.offset, wait_s=wait_s
        )
    )


async def stop(call: Call[Nothing, Nothing]) -> Response:
    """Answer with the result of the stopped run."""
    return answered(await call.service.stop_run(call.owner, call.sandbox_id, call.run_id))


async def send_input(call: Call[InputQuery, Nothing]) -> Response:
    """Answer when the run has taken the content of the request as input."""
    data = bytearray()
    async for part in received(call.request, "stdin"):
        data += part
        if len(data) > MAX_INPUT_BYTES:
            raise InputTooLarge(f"The input has more than {MAX_INPUT_BYTES:,} bytes. Send it in parts.")
    return answered(
        await call.service.write_stdin(call.owner, call.sandbox_id, call.run_id, bytes(data), close=call.query.close)
    )


async def follow(call: Call[EventsQuery, Nothing]) -> Response:
    """Answer with events until the run is over. Errors before the first event are ordinary answers."""
    last_id = call.request.headers.get("last-event-id")
    if last_id == LAST_EVENT:
        return Response(status_code=204)  # browsers stop reconnecting then
    if last_id is not None and not OFFSET.fullmatch(last_id):
        raise BadRequest("Last-Event-ID is not the id of an event.")
    offset = int(last_id) if last_id is not None else call.query.offset
    first = await _look(call, offset, wait_s=0)
    return EventSourceResponse(_events(call, first), ping=PING_S, sep="\n")


async def _events(call: Call[EventsQuery, Nothing], progress: RunProgress) -> AsyncIterator[ServerSentEvent]:
    """Yield the output as it comes, then the result or why there is none.

    An event's id is where the output goes on after it: a client that reconnects sends it back and misses nothing.
    """
    while True:
        page = progress.page
        if page.text:
            yield _event("output", page.model_dump_json(), str(page.end))
        if page.end >= page.size:
            if progress.result is not None:
                yield _event("result", progress.result.model_dump_json(), LAST_EVENT)
                return
            if progress.error is not None:
                yield _event("error", problem_of(progress.error).model_dump_json(), LAST_EVENT)
                return
        try:
            progress = await _look(call, page.end, LOOK_S)
        except SandboxError as error:  # the sandbox was closed meanwhile
            yield _event("error", problem_of(error).model_dump_json(), LAST_EVENT)
            return


async def _look(call: Call[EventsQuery, Nothing], offset: int, wait_s: float) -> RunProgress:
    return await call.service.read_output(
        call.owner, call.sandbox_id, call.run_id, offset=offset, wait_s=wait_s, full_page=False
    )


def _event(kind: str, data: str, number: str) -> ServerSentEvent:
    return ServerSentEvent(data, event=kind, id=number, sep="\n")


RUNS = "/sandboxes/{sandbox_id}/runs"
OPERATIONS = (
    Operation(
        "POST",
        "/runs",
        "run_once",
        "Run something in a one-off sandbox",
        {200: RunView, 202: RunProgress},
        start,
        tuple(TOOLS.values()),
        body=RunBody,
        keyed=True,
    ),
    Operation(
        "POST",
        RUNS,
        "run",
        "Run something in a sandbox",
        {200: RunView, 202: RunProgress},
        start,
        tuple(TOOLS.values()),
        body=RunBody,
        keyed=True,
    ),
    Operation(
        "GET",
        f"{RUNS}/{{run_id}}",
        "get_run",
        "Read a run's output from a byte offset, and its result",
        {200: RunProgress},
        get,
        ("read_output",),
        query=OutputQuery,
    ),
    Operation(
        "GET",
        f"{RUNS}/{{run_id}}/events",
        "follow_run",
        "Follow a run: its output as it comes, then its result, as server-sent events",
        {200: "text/event-stream", 204: None},
        follow,
        ("read_output",),
        query=EventsQuery,
    ),
    Operation(
        "POST",
        f"{RUNS}/{{run_id}}/stdin",
        "send_input",
        "Send input to a run that was started with stdin_open",
        {200: SentInput},
        send_input,
        ("run_code", "run_command"),
        query=InputQuery,
        uploads=True,
    ),
    Operation("POST", f"{RUNS}/{{run_id}}/stop", "stop_run", "Stop a run", {200: RunView}, stop, ("stop_run",)),
)
