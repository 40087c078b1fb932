"""Jobs without a machine: the guest's own code in this process, through a real bridge."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.abc import ByteStream

from guest.web.client import Proxy, open_client
from guest.web.errors import WebError
from guest.web.kinds import KINDS, read
from guest.web.offline import Reader
from tests.web.sites import serving, trusting
from tests.web.world import World
from websearch.access import Caller
from websearch.jobs import Answer, JobFailed


class LocalJobs:
    """Runs each job in a thread; `sent` has the fields that a machine would get."""

    def __init__(self, proxy: Proxy, tls: ssl.SSLContext) -> None:
        self._proxy = proxy
        self._tls = tls
        self.sent: list[Mapping[str, Any]] = []

    async def run(self, kind: str, fields: Mapping[str, Any], *, caller: Caller, timeout_s: float) -> Answer:
        self.sent.append(fields)
        try:
            with anyio.fail_after(timeout_s):
                header, body = await anyio.to_thread.run_sync(partial(self._work, kind, dict(fields)))
        except WebError as error:
            raise JobFailed(error.code, str(error), error.fields) from error
        return Answer(header, body)

    def _work(self, kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        with Reader(read) as reader, open_client("token", proxy=self._proxy, tls=self._tls) as client:
            return KINDS[kind].run({"kind": kind, **fields}, client, reader)


@asynccontextmanager
async def local_jobs(world: World) -> AsyncIterator[LocalJobs]:
    """Yield jobs whose connections go through a bridge with the world's policy, secrets and names."""
    bridge = world.bridge()

    async def serve(stream: ByteStream) -> None:
        await bridge.serve(stream, Caller("ada", "web"))

    async with serving(serve) as port:
        yield LocalJobs(Proxy("127.0.0.1", port), trusting(world.authority))
