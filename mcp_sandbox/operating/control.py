"""The control socket of a server: one JSON line in, one JSON line out. Only the server's user can open it.

<home>/run/<pid>-<start time>-control

{"do": "list"}                           {"ok": true, "result": [{"sandbox_id": "sb-…", …}, …]}
{"do": "close", "sandbox_id": "sb-…"}    {"ok": true, "result": true}; false if it had already ended
{"do": "stats"}                          {"ok": true, "result": {…}}
{"do": "metrics"}                        {"ok": true, "result": "# HELP …"}
anything else                            {"ok": false, "error": "…"}
"""

import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import anyio
from anyio.abc import SocketListener, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcp_sandbox.errors import SandboxError
from vmm.process_table import ProcessId, is_alive

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 16 << 20  # far more than the metrics of a thousand machines
MAX_CLIENTS = 16
IO_TIMEOUT_S = 5.0  # a silent client must not occupy a slot
WORK_TIMEOUT_S = 20.0  # closing a sandbox can take seconds, more on a busy host
ANSWER_TIMEOUT_S = WORK_TIMEOUT_S + 2 * IO_TIMEOUT_S  # longer than any server takes
ACCEPT_RETRY_S = 1.0  # out of file descriptors, for example
SOCKET = re.compile(r"(\d+)-(\d+)-control")

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Panel(Protocol):
    """What an operator can see and do."""

    def sandboxes(self) -> list[Mapping[str, object]]: ...

    async def close(self, sandbox_id: str) -> bool:
        """Close a sandbox of any owner; False if it was already ending. Raises SandboxNotFound."""
        ...

    def stats(self) -> Mapping[str, object]: ...

    async def metrics(self) -> str: ...


class Request(BaseModel):
    """A request of an operator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    do: Literal["list", "close", "stats", "metrics"]
    sandbox_id: str = Field("", max_length=100)


@dataclass(eq=False)
class ControlError(SandboxError):
    """A server did not carry out an operator's request."""

    code = "control_failed"
    sentence = "{reason}"
    reason: str


@dataclass(eq=False)
class ServerGone(ControlError):
    """No server answers at the control socket."""

    code = "server_gone"


# -- server ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serve_control(run_dir: Path, server: ProcessId, panel: Panel) -> AsyncIterator[None]:
    """Answer operators as long as the block lasts. A server that cannot listen logs it and continues."""
    name = f"{server.pid}-{server.started}-control"
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_dir.chmod(0o700)  # before there is a socket in it
        with _short_path(run_dir) as directory:
            listener = await anyio.create_unix_listener(f"{directory}/{name}", mode=0o600, backlog=MAX_CLIENTS)
    except OSError as error:
        logger.warning("cannot open the control socket, so `mcp-sandbox sandbox` cannot reach this server: %s", error)
        yield
        return
    try:
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(_serve, listener, panel)
            yield
            tasks.cancel_scope.cancel()
    finally:
        (run_dir / name).unlink(missing_ok=True)


async def _serve(listener: SocketListener, panel: Panel) -> None:
    """Serve every client in its own task."""
    clients, logged = anyio.CapacityLimiter(MAX_CLIENTS), False
    async with anyio.create_task_group() as tasks:
        while True:
            try:
                stream = await listener.accept()
            except anyio.BrokenResourceError as error:
                if not logged:
                    logger.warning("cannot accept connections at the control socket: %s", error.__cause__)
                logged = True
                await anyio.sleep(ACCEPT_RETRY_S)
            else:
                logged = False
                tasks.start_soon(_serve_client, panel, clients, stream)


async def _serve_client(panel: Panel, clients: anyio.CapacityLimiter, stream: SocketStream) -> None:
    async with stream:
        try:
            clients.acquire_on_behalf_of_nowait(stream)
        except anyio.WouldBlock:
            return
        try:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError):
                answer = json.dumps(await _answer(panel, stream)).encode() + b"\n"
                with anyio.fail_after(IO_TIMEOUT_S):
                    await stream.send(answer)
        finally:
            clients.release_on_behalf_of(stream)


async def _answer(panel: Panel, stream: SocketStream) -> dict[str, object]:
    try:
        with anyio.fail_after(IO_TIMEOUT_S):
            line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_REQUEST_BYTES)
        request = Request.model_validate_json(line)
        return {"ok": True, "result": await _bounded(_do(panel, request))}
    except SandboxError as error:
        return {"ok": False, "error": str(error)}
    except (ValidationError, anyio.DelimiterNotFound, anyio.IncompleteRead):
        return {"ok": False, "error": 'Not a request: send one line such as {"do": "list"}.'}
    except (TimeoutError, anyio.BrokenResourceError):
        raise
    except Exception as error:  # a bug here must not end the server
        logger.warning("a control request failed", exc_info=error)
        return {"ok": False, "error": f"The server failed: {error}."}


async def _bounded(work: Awaitable[T]) -> T:
    try:
        with anyio.fail_after(WORK_TIMEOUT_S):
            return await work
    except TimeoutError:
        raise ControlError(
            f"The server did not finish within {WORK_TIMEOUT_S:g} s and is still working on the request."
        ) from None


async def _do(panel: Panel, request: Request) -> object:
    match request.do:
        case "list":
            return panel.sandboxes()
        case "close":
            return await panel.close(request.sandbox_id)
        case "stats":
            return panel.stats()
        case "metrics":
            return await panel.metrics()


# -- client ------------------------------------------------------------------------------------------------


def live_servers(run_dir: Path) -> list[ProcessId]:
    """Return the servers of this home that have a control socket, oldest first."""
    names = [SOCKET.fullmatch(path.name) for path in run_dir.glob("*-control")]
    found = [ProcessId(int(name[1]), int(name[2])) for name in names if name]
    return sorted(filter(is_alive, found), key=lambda process: process.started)


def ask(run_dir: Path, server: ProcessId, request: Request, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:  # noqa: ANN401 - JSON
    """Send a request to a server and return the result. Blocks.

    Raises:
        ServerGone: the server does not answer.
        ControlError: the server refuses.
    """
    try:
        with _short_path(run_dir) as directory, socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(timeout_s)
            wire.connect(f"{directory}/{server.pid}-{server.started}-control")
            wire.sendall(request.model_dump_json().encode() + b"\n")
            with wire.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_ANSWER_BYTES))
        if not answer["ok"]:
            raise ControlError(answer["error"])
        return answer["result"]
    except (OSError, ValueError, RecursionError, TypeError, LookupError) as error:
        raise ServerGone(f"Server {server.pid} does not answer ({error}).") from error


@contextmanager
def _short_path(run_dir: Path) -> Iterator[str]:
    """Yield a short path to the directory, because the path of a socket may have at most 107 bytes."""
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}"
    finally:
        os.close(directory)
