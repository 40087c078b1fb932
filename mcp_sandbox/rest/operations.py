"""An operation says where it is, what it takes and what it answers: routes and OpenAPI document come from one list."""

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from guest.client.wire import one_line
from mcp_sandbox.accounts.audit import audited, note
from mcp_sandbox.accounts.owners import TokenReadOnly, current_owner
from mcp_sandbox.errors import BadRequest, InputTooLarge, SandboxError
from mcp_sandbox.rest.bodies import Nothing
from mcp_sandbox.rest.disconnects import CLIENT_GONE, unless_gone
from mcp_sandbox.rest.idempotency import Keys, fingerprint
from mcp_sandbox.rest.problems import answer_with, problem_of, refusal
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import View

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_JSON_BYTES = 8 << 20  # code has at most 1 MB, and escapes make JSON up to six times as long
MAX_KEY_CHARS = 255
MAX_PROBLEMS = 5  # of a body or a query, named in an error
MOST_PROBLEMS = 100  # with more none is named: describing each takes time and memory
MAX_PLACE_CHARS = 60
MAX_PROBLEM_CHARS = 200

Q = TypeVar("Q", bound=BaseModel)
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """A request whose parameters have been checked."""

    service: SandboxService
    request: Request
    owner: str
    tools: Collection[str]  # that the server offers to the caller
    query: Q
    body: B

    @property
    def sandbox_id(self) -> str:
        """The sandbox that the path names."""
        return str(self.request.path_params["sandbox_id"])

    @property
    def run_id(self) -> str:
        """The run that the path names."""
        return str(self.request.path_params["run_id"])

    @property
    def artifact_id(self) -> str:
        """What the path names of all that was fetched."""
        return str(self.request.path_params["artifact_id"])


@dataclass(frozen=True, slots=True)
class Operation(Generic[Q, B]):
    """Something a client can do: where, with what, and what it is answered."""

    method: str
    path: str  # below /api/v1
    name: str
    summary: str
    answers: Mapping[int, type[View] | str | None]  # by status: a view as JSON, another media type, or nothing
    handle: Callable[[Call[Q, B]], Awaitable[Response]]
    tools: tuple[str, ...]  # it is offered if one of these is, so that one setting limits both faces; none: always
    query: type[Q] = field(default=Nothing)  # type: ignore[assignment]
    body: type[B] = field(default=Nothing)  # type: ignore[assignment]
    keyed: bool = False  # takes an Idempotency-Key
    uploads: bool = False  # its handler reads the request's content itself

    def is_offered(self, tools: Collection[str]) -> bool:
        """Return whether a server with these tools has it."""
        return not self.tools or any(tool in tools for tool in self.tools)

    async def answer(self, service: SandboxService, keys: Keys, tools: Collection[str], request: Request) -> Response:
        """Carry out a request and log who made it. Every error becomes a problem."""
        try:
            with audited("rest", self.name):
                note(request.path_params.get("sandbox_id"), request.path_params.get("run_id"))
                return await self._answer(service, keys, tools, request)
        except SandboxError as error:
            return answer_with(problem_of(error))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception:
            logger.exception("%s failed", self.name)
            return refusal(500)

    async def _answer(self, service: SandboxService, keys: Keys, tools: Collection[str], request: Request) -> Response:
        if not self.is_offered(tools):
            raise TokenReadOnly
        for name, value in request.path_params.items():
            if not ID.fullmatch(value):
                raise BadRequest(f"The {name} in the path has characters that no id has, or is too long.")
        query = checked("query", lambda: self.query.model_validate(dict(request.query_params)))
        data = b"" if self.uploads or self.body is Nothing else await json_body(request)
        body = checked("body", lambda: self.body.model_validate_json(data or b"{}", strict=True))
        call = Call(service, request, current_owner(), tools, query, body)
        if self.uploads:  # the handler notices itself if the client has left
            return await self.handle(call)
        key = request.headers.get("idempotency-key") if self.keyed else None
        if key is None:
            return await unless_gone(request, lambda: self.handle(call))
        if not 1 <= len(key) <= MAX_KEY_CHARS:
            raise BadRequest(f"An Idempotency-Key has 1 to {MAX_KEY_CHARS} characters.")
        mark = fingerprint(self.method, request.url.path, data)
        work = keys.answer(call.owner, key, mark, lambda: self.handle(call))
        return await unless_gone(request, lambda: work)


def answered(view: View, status: int = 200, location: str | None = None) -> Response:
    """Return a view as JSON."""
    note(getattr(view, "sandbox_id", None), getattr(view, "run_id", None))
    headers = {} if location is None else {"Location": location}
    return Response(view.model_dump_json(), status, headers, "application/json")


async def json_body(request: Request) -> bytes:
    """Return the request's content, which is short and JSON, or nothing."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_JSON_BYTES:
            raise InputTooLarge(f"The body has more than {MAX_JSON_BYTES:,} bytes.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and kind != "application/json":
        raise BadRequest("Send the body as JSON, with Content-Type: application/json.")
    return bytes(data)


def checked(what: str, parse: Callable[[], T]) -> T:
    """Return what `parse` makes. Raises BadRequest, which names what is wrong in one line."""
    try:
        return parse()
    except ValidationError as error:
        if error.error_count() > MOST_PROBLEMS:
            raise BadRequest(f"The {what} is wrong in {error.error_count():,} places.") from None
        found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(map(str, problem["loc"])) or what for problem in found[:MAX_PROBLEMS]]
    problems = [
        f"{one_line(place, MAX_PLACE_CHARS)}: {one_line(problem['msg'], MAX_PROBLEM_CHARS)}"
        for place, problem in zip(places, found, strict=False)
    ]
    more = f"; and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
    raise BadRequest(f"The {what} is wrong. {'; '.join(problems)}{more}.")
