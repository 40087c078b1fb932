"""The MCP server on stdio. The SDK takes most of the start to import, so the first machine starts meanwhile."""

import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread

from mcp_sandbox import logs
from mcp_sandbox.app import Host, open_host, open_service
from mcp_sandbox.config import Settings, config_files, project_config_file
from mcp_sandbox.late_models import models_built_later
from mcp_sandbox.serving.early import EarlyGreeting
from mcp_sandbox.serving.greeting import Greeting
from mcp_sandbox.serving.lifetime import parent_gone, run_until_stopped
from mcp_sandbox.serving.stdio import message_streams
from mcp_sandbox.serving.wire import claimed_stdio

if TYPE_CHECKING:
    from mcp_sandbox.sandboxes.service import SandboxService
    from mcp_sandbox.serving.server import SandboxServer

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 0.5  # after the end of stdin, for answers on their way; then what still runs is cancelled
# What the SDK imports if it can, for HTTP and for logs of its own: a tenth of its imports.
NOT_NEEDED = ("uvicorn.main", "rich.console")
SWITCH_S = 0.0005  # Python's 5 ms, at each of the many steps of a start, would add up


async def serve_stdio(
    open_server: Callable[[], AbstractAsyncContextManager["SandboxServer"]],
    *,
    parent: int,
    max_message_bytes: int,
    early: EarlyGreeting | None = None,
) -> None:
    """Serve one client on stdin and stdout until it disconnects, a signal arrives or process `parent` ends."""
    with claimed_stdio() as wire:
        ended, greeting = anyio.Event(), Greeting(early)

        async def client_left() -> str:
            await ended.wait()
            await anyio.sleep(LAST_ANSWERS_S)
            return "the client closed stdin"

        async def serve() -> None:
            async with (
                message_streams(*wire, max_message_bytes, greeting, ended) as (incoming, outgoing),
                open_server() as server,
            ):
                greeting.sdk_ready.set()
                lowlevel = server._lowlevel_server  # noqa: SLF001 - MCPServer itself reads stdin in a thread
                await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())

        await run_until_stopped(serve, client_left, lambda: parent_gone(parent))


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator["SandboxServer"]:
    """Open a server over this host's sandboxes, once the driver is chosen. Its client is greeted meanwhile."""
    await anyio.lowlevel.checkpoint()  # the answer goes out before what follows is imported
    async with open_host(settings) as host, AsyncExitStack() as stack:
        with models_built_later():
            service = await stack.enter_async_context(open_service(host, pooled=True))
            server = await _import_server(settings, host, service)
        warn_of_templates(settings)
        yield server


async def _import_server(settings: Settings, host: Host, service: "SandboxService") -> "SandboxServer":
    """Import the SDK in another thread, so that the first machine starts meanwhile."""
    with left_out(*NOT_NEEDED):
        with _switching_often():
            await anyio.to_thread.run_sync(import_module, "mcp_sandbox.serving.server")
        from mcp_sandbox.serving.server import create_server

        gc.freeze()  # what was imported is never garbage: no collection has to look at it again
        gc.enable()  # `start` disabled it
        return create_server(settings, in_force(host), lambda: nullcontext(service))


@contextmanager
def left_out(*modules: str) -> Iterator[None]:
    """Let imports of modules fail that are not imported yet."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: importing it is an ImportError
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let the event loop interrupt other threads sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def warn_of_templates(settings: Settings) -> None:
    """Log which templates cannot be used."""
    for entry in settings.catalogue.entries():
        if entry.error:
            logger.warning("template %s has errors: %s", entry.name, entry.error)


def in_force(host: Host) -> str:
    """Describe to a model what separates sandboxes from this host."""
    if host.facts is not None:
        return str(host.facts)
    verdict = host.choice.verdict
    steps = ", then ".join(filter(None, (verdict.fix, "restart this server")))
    return f"none, because this host cannot start sandboxes: {verdict.reason}. To fix it: {steps}"


def run_stdio(settings: Settings, early: EarlyGreeting | None = None) -> None:
    """Serve this host's sandboxes on stdio until everything has ended."""
    logs.configure(settings.log.level, settings.log.format)
    log_config_files()
    if settings.tracing:
        from mcp_sandbox.operating.metrics import enable_tracing

        enable_tracing()
    serve = partial(
        serve_stdio,
        partial(open_server, settings),
        parent=os.getppid(),
        max_message_bytes=max_message_bytes(settings),
        early=early,
    )
    anyio.run(serve)


def log_config_files() -> None:
    """Log which files the settings are from. A user may not know that the working directory has one."""
    for path in config_files():
        level = logging.WARNING if path == project_config_file() else logging.INFO
        logger.log(level, "settings from %s", path)


def max_message_bytes(settings: Settings) -> int:
    """Return the longest message to accept: JSON and base64 make content longer."""
    return 2 * (settings.files.max_write_bytes + settings.runs.max_code_bytes)
