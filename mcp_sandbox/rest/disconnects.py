"""Work that ends with the client that asked for it."""

from collections.abc import Awaitable, Callable

import anyio
from starlette.requests import Request
from starlette.responses import Response

CLIENT_GONE = 499  # nginx' number for a request whose client left before the answer; only logs see it


async def unless_gone(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """Return what `work` answers. It is cancelled if the client disconnects."""
    response = Response(status_code=CLIENT_GONE)
    failure: Exception | None = None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            response = await work()
        except Exception as error:  # raised outside, where it is not wrapped in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return response
