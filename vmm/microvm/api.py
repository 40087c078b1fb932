"""Firecracker's API: HTTP on a Unix socket, which Firecracker creates in its root directory when it starts."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import httpx2

from vmm.errors import MachineLost
from vmm.process import RunningProcess
from vmm.vsock import find_socket

API_S = 20.0  # answers take milliseconds; a busy host needs much longer
ROOT = "/proc/{}/root"  # the root directory of a process
LOOK_AGAIN_S = 0.001  # Firecracker does not announce its socket, which is there within 10 ms

Method = Literal["GET", "PUT", "PATCH"]


class Refused(Exception):
    """Firecracker refused a request. The message is its own."""


class Api:
    """Requests to one Firecracker process."""

    def __init__(self, client: httpx2.AsyncClient, process: RunningProcess) -> None:
        self._client = client
        self._process = process

    async def ask(
        self, method: Method, path: str, body: Mapping[str, Any] | None = None, *, wait_s: float = API_S
    ) -> Any:  # noqa: ANN401 - its answers are JSON
        """Make a request and return its answer; raise Refused or MachineLost."""
        try:
            with anyio.fail_after(wait_s):
                answer = await self._client.request(method, path, json=body)
        except (httpx2.HTTPError, TimeoutError) as error:
            why = self._process.tail or str(error) or f"no answer in {wait_s:g} s"
            raise MachineLost(f"Firecracker's {path} failed: {why}") from error
        if answer.is_success:
            return answer.json() if answer.content else None
        try:
            fault = str(answer.json()["fault_message"])
        except (ValueError, KeyError, TypeError):
            fault = f"status {answer.status_code}"
        raise Refused(f"{path}: {fault}")


@asynccontextmanager
async def connected(process: RunningProcess, name: str) -> AsyncIterator[tuple[Api, int]]:
    """Wait until Firecracker listens, and talk to it. Yields also a descriptor of the root directory of its namespaces.

    Raises:
        MachineLost: it has ended, or does not answer.
    """
    root, place = await _listening(process, name)
    try:
        transport = httpx2.AsyncHTTPTransport(uds=f"/proc/self/fd/{place}", limits=httpx2.Limits(max_connections=1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            api = Api(client, process)
            await api.ask("GET", "/version")
            yield api, root
    finally:
        os.close(place)
        os.close(root)


async def _listening(process: RunningProcess, name: str) -> tuple[int, int]:
    """Return descriptors of the machine's root directory and of the socket in it, once they are there.

    The host reaches them through the process: no directory of the host is in the machine. Until the process has its own
    root directory, the host's is looked at, which has no such file.
    """
    with anyio.move_on_after(API_S):
        while True:
            root = -1
            try:
                root = os.open(ROOT.format(process.pid), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                return root, find_socket(root, name)
            except OSError:
                if root >= 0:
                    os.close(root)
                with anyio.move_on_after(LOOK_AGAIN_S):
                    raise MachineLost(f"Firecracker ended with {await process.wait()}") from None
    raise MachineLost(f"Firecracker does not answer: {process.tail}")
