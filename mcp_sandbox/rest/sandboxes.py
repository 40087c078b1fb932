"""Operations on sandboxes and templates."""

from starlette.responses import Response

from mcp_sandbox.rest.bodies import Fork, NewSandbox, Nothing, PageQuery
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.rest.operations import Call, Operation, answered
from mcp_sandbox.views import ClosedSandbox, ForkedSandboxes, SandboxList, SandboxView, TemplateView, View


class TemplateList(View):
    """All templates that sandboxes can be created from."""

    templates: list[TemplateView]


async def create(call: Call[Nothing, NewSandbox]) -> Response:
    """Answer with a sandbox that is ready."""
    wanted = call.body
    box = await call.service.create(
        call.owner,
        wanted.template,
        ttl_s=wanted.ttl_s,
        idle_s=wanted.idle_s,
        memory_mb=wanted.memory_mb,
        cpus=wanted.cpus,
        network=wanted.network,
        allow_domains=wanted.allow_domains,
    )
    return answered(box, 201, f"{ROOT}/sandboxes/{box.sandbox_id}")


async def list_all(call: Call[PageQuery, Nothing]) -> Response:
    """Answer with a page of sandboxes."""
    return answered(call.service.list_sandboxes(call.owner, offset=call.query.offset))


async def get(call: Call[Nothing, Nothing]) -> Response:
    """Answer with a sandbox."""
    return answered(call.service.get(call.owner, call.sandbox_id))


async def close(call: Call[Nothing, Nothing]) -> Response:
    """Answer when nothing of the sandbox is left."""
    closed = await call.service.close(call.owner, call.sandbox_id)
    return answered(ClosedSandbox(sandbox_id=call.sandbox_id, closed=closed))


async def fork(call: Call[Nothing, Fork]) -> Response:
    """Answer with the copies."""
    copies = await call.service.fork(call.owner, call.sandbox_id, call.body.count, call.body.reseed)
    return answered(ForkedSandboxes(copies=copies), 201)


async def pause(call: Call[Nothing, Nothing]) -> Response:
    """Answer with the paused sandbox."""
    return answered(await call.service.pause(call.owner, call.sandbox_id))


async def resume(call: Call[Nothing, Nothing]) -> Response:
    """Answer with the sandbox, which is ready again."""
    return answered(await call.service.resume(call.owner, call.sandbox_id))


async def templates(call: Call[Nothing, Nothing]) -> Response:
    """Answer with all templates. What the service does not tell is left out: null would say something."""
    listed = TemplateList(templates=call.service.templates())
    return Response(listed.model_dump_json(exclude_none=True), media_type="application/json")


BOX = "/sandboxes/{sandbox_id}"
OPERATIONS = (
    Operation("GET", "/templates", "list_templates", "List the templates", {200: TemplateList}, templates, ()),
    Operation(
        "POST",
        "/sandboxes",
        "create_sandbox",
        "Create a sandbox and wait until it is ready",
        {201: SandboxView},
        create,
        ("create_sandbox",),
        body=NewSandbox,
        keyed=True,
    ),
    Operation(
        "GET",
        "/sandboxes",
        "list_sandboxes",
        "List your sandboxes",
        {200: SandboxList},
        list_all,
        ("list_sandboxes",),
        query=PageQuery,
    ),
    Operation("GET", BOX, "get_sandbox", "Show a sandbox", {200: SandboxView}, get, ("list_sandboxes",)),
    Operation(
        "DELETE",
        BOX,
        "close_sandbox",
        "End a sandbox and delete all of it",
        {200: ClosedSandbox},
        close,
        ("close_sandbox",),
    ),
    Operation(
        "POST",
        f"{BOX}/fork",
        "fork_sandbox",
        "Copy a sandbox with its variables, processes and files",
        {201: ForkedSandboxes},
        fork,
        ("fork_sandbox",),
        body=Fork,
        keyed=True,
    ),
    Operation(
        "POST", f"{BOX}/pause", "pause_sandbox", "Save a sandbox to disk", {200: SandboxView}, pause, ("pause_sandbox",)
    ),
    Operation(
        "POST",
        f"{BOX}/resume",
        "resume_sandbox",
        "Continue a paused sandbox",
        {200: SandboxView},
        resume,
        ("resume_sandbox",),
    ),
)
