"""The API of a monitor: HTTP on a Unix socket, which the monitor creates in its root directory when it starts."""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import anyio
import httpx2

from vmm.errors import MachineLost
from vmm.microvm.layout import API_SOCKET
from vmm.probe import PTRACE_ADVICE
from vmm.process import RunningProcess
from vmm.vsock import find_socket, open_socket

API_S = 20.0  # answers take milliseconds; a busy host needs much longer
START_S = 60.0  # so does the start, for which several programs are run
ROOT = "/proc/{}/root"  # the root directory of a process
# A process that changes its user may not be looked into for milliseconds. A server that has lost that right never may.
DENIED_S = 10.0
LOOK_AGAIN_S = 0.001  # a monitor does not announce its socket, which is there within 10 ms
ONE_CONNECTION = httpx2.Limits(max_connections=1)
MAX_ANSWER = 64 * 1024  # bytes; honest answers are a line or two
MAX_FAULT = 500  # characters of an error message, or of what the monitor printed, perhaps for the guest


class Request(NamedTuple):
    """What a monitor is asked to do."""

    method: Literal["GET", "PUT", "PATCH"]
    path: str
    body: Mapping[str, Any] | None = None


class Refused(Exception):
    """The monitor refused a request. The message is its own."""


class Api:
    """Requests to one process of a monitor."""

    def __init__(self, title: str, client: httpx2.AsyncClient, process: RunningProcess) -> None:
        self._title = title
        self._client = client
        self._process = process

    async def ask(self, request: Request, *, wait_s: float = API_S) -> None:
        """Make a request; raise Refused or MachineLost."""
        method, path, body = request
        try:
            with anyio.fail_after(wait_s):
                async with self._client.stream(method, path, json=body) as answer:
                    content = await _content(answer)
        except (httpx2.HTTPError, TimeoutError) as error:
            why = str(error) or f"no answer in {wait_s:g} s"
            printed = f"; it printed: {tail[-MAX_FAULT:]}" if (tail := self._process.tail) else ""
            raise MachineLost(f"{self._title}'s {path} failed: {why}{printed}") from error
        if not answer.is_success:
            raise Refused(f"{path}: {_fault(content) or f'status {answer.status_code}'}")


async def _content(answer: httpx2.Response) -> bytes:
    """Return what was sent, neither decompressed nor of any length: the monitor may have been taken over."""
    content = b""
    async for chunk in answer.aiter_raw():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise httpx2.ReadError(f"an answer of more than {MAX_ANSWER} bytes")
    return content


def _fault(content: bytes) -> str:
    """Return the reason of a refusal: Firecracker sends an object, Cloud Hypervisor a list of causes or plain text."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = content.decode("utf-8", "replace")
    if isinstance(found, dict):
        found = found.get("fault_message")
    text = ": ".join(map(str, found)) if isinstance(found, list) else str(found or "")
    return text[:MAX_FAULT]


@asynccontextmanager
async def connected(process: RunningProcess, title: str, hello: Request) -> AsyncIterator[tuple[Api, int]]:
    """Wait until the monitor answers. Yields also a descriptor of the root directory of its namespaces.

    Raises:
        MachineLost: it has ended, or does not answer.
    """
    root, place = await _listening(process, title)
    try:
        # There is no TLS on this socket. To verify it would load all of the host's certificates, which takes 90 ms.
        transport = httpx2.AsyncHTTPTransport(uds=f"/proc/self/fd/{place}", limits=ONE_CONNECTION, verify=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            api = Api(title, client, process)
            await api.ask(hello)
            yield api, root
    finally:
        os.close(place)
        os.close(root)


async def _listening(process: RunningProcess, title: str) -> tuple[int, int]:
    """Return descriptors of the machine's root directory and of the socket in it, once they are there.

    The host reaches them through the process: no directory of the host is in the machine. Until the process has its own
    root directory, the host's is looked at, which has no such file.
    """
    began = anyio.current_time()
    with anyio.move_on_after(START_S):
        while True:
            try:
                return _root_and_socket(process.pid)
            except OSError as error:
                if isinstance(error, PermissionError) and anyio.current_time() > began + DENIED_S:
                    raise MachineLost(f"the server may not reach it ({error}): {PTRACE_ADVICE}") from error
                # Less and less often: looking must not slow down the start on a busy host.
                with anyio.move_on_after(max(LOOK_AGAIN_S, (anyio.current_time() - began) / 10)):
                    raise MachineLost(f"{title} ended with {await process.wait()}") from None
    raise MachineLost(f"{title} does not answer: {process.tail or f'no socket in {START_S:.0f} s'}")


def _root_and_socket(pid: int) -> tuple[int, int]:
    root = os.open(ROOT.format(pid), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        open_socket(root, API_SOCKET).close()  # it is there before the monitor listens on it
        return root, find_socket(root, API_SOCKET)
    except BaseException:
        os.close(root)
        raise
