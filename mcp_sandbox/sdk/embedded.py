"""The service in the caller's process. It answers the same requests as a server, so there is one client for both.

All sandboxes of an event loop share a service, because a service counts the memory that its machines take.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

import anyio

from guest.errors import first_error
from mcp_sandbox.errors import HostNotReady
from mcp_sandbox.sdk.in_process import InProcess
from templates.errors import TemplateError
from vmm.errors import DriverUnavailable, VmmError
from vmm.trust import make_private


class Engine:
    """A service and its transport, held by a task of its own: any task may be the last one to use it."""

    def __init__(self) -> None:
        self.users = 0
        self._ready: asyncio.Future[InProcess] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def transport(self) -> InProcess:
        """Return the transport once the service is open.

        Raises:
            HostNotReady, TooWeak: this host cannot run sandboxes as configured.
        """
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """End all machines and wait until nothing is left."""
        self._stop.set()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with _opened() as transport:
                self._ready.set_result(transport)
                await self._stop.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            if isinstance(error, asyncio.CancelledError):
                self._ready.cancel()
                raise
            self._ready.set_exception(_explained(first_error(error)))
            self._ready.exception()  # the caller may have been cancelled; then nothing else looks at it


_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = WeakKeyDictionary()


@asynccontextmanager
async def engine_in_use() -> AsyncIterator[InProcess]:
    """Yield the transport to this event loop's service, which ends with its last user."""
    loop = asyncio.get_running_loop()
    engine = _engines.get(loop)
    if engine is None:
        engine = _engines[loop] = Engine()
    engine.users += 1
    try:
        yield await engine.transport()
    finally:
        engine.users -= 1
        if not engine.users:
            if _engines.get(loop) is engine:
                del _engines[loop]
            await engine.close()


@asynccontextmanager
async def _opened() -> AsyncIterator[InProcess]:
    # Imported here: a client of a server needs none of it.
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Mount

    from mcp_sandbox.app import open_host, open_service
    from mcp_sandbox.config import load_settings
    from mcp_sandbox.rest.app import OPERATIONS, open_rest
    from mcp_sandbox.rest.next_steps import ROOT
    from mcp_sandbox.rest.problems import refused

    settings = load_settings()
    make_private(settings.home)
    tools = {tool for operation in OPERATIONS for tool in operation.tools}  # the caller is the operator
    async with (
        open_host(settings) as host,
        open_service(host, pooled=False) as service,
        open_rest(service, tools) as rest,
        anyio.create_task_group() as tasks,
    ):
        app = Starlette(routes=[Mount(ROOT, rest)], exception_handlers={HTTPException: refused})
        yield InProcess(app, tasks)
        tasks.cancel_scope.cancel()


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, DriverUnavailable):
        return HostNotReady(str(error), error.fix)
    return HostNotReady(str(error)) if isinstance(error, VmmError | TemplateError) else error
