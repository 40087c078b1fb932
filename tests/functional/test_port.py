"""`mcp-sandbox port`: a web server in a sandbox without a network, opened from this host."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mcp_sandbox.accounts.tokens import Tokens
from tests.functional.checkout import REPO
from tests.functional.test_cli_server import terminal
from tests.functional.test_http_server import tokens
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

__all__ = ["tokens"]

PORT = 8123
# It says that it listens; a page of 3 MB is more than all windows.
SERVER = f"""
import http.server
class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 3_000_000 if self.path == "/large" else b"hello")
    def do_POST(self):
        size = int(self.headers["Content-Length"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(len(self.rfile.read(size))).encode())
server = http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Site)
print("listening", flush=True)
server.serve_forever()
"""


@asynccontextmanager
async def forwarded(url: str, box: str, token: str | None = None) -> AsyncIterator[tuple[Process, str]]:
    """Run the command, and yield the address that it prints."""
    command = [sys.executable, "-m", "mcp_sandbox", "port", box, f"{PORT}:0", "--url", url]
    environment = {**os.environ, "COLUMNS": "200"} | ({"MCP_SANDBOX_TOKEN": token} if token else {})
    async with await anyio.open_process(command, cwd=REPO, env=environment, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, (await TextReceiveStream(process.stdout).receive()).strip()
        finally:
            if process.returncode is None:
                process.terminate()


async def test_a_server_in_a_sandbox_without_a_network_is_opened_on_this_host():
    async with terminal() as user, httpx2.AsyncClient(timeout=HANG_S) as http:
        box = await user.output("sandbox", "create")
        place = f"{user.url.removesuffix('/mcp')}/api/v1/sandboxes/{box}"
        async with forwarded(user.url, box) as (process, site):
            with pytest.raises(httpx2.HTTPError):  # nothing listens yet
                await http.get(site)
            run = (await http.post(f"{place}/runs", json={"code": SERVER, "background": True})).json()["run_id"]
            while "listening" not in (await http.get(f"{place}/runs/{run}")).text:
                pass
            assert (await http.get(site)).text == "hello"
            assert len((await http.get(f"{site}/large")).content) == 3_000_000
            assert (await http.post(site, content=bytes(2_000_000))).text == "2000000"
            await user.output("sandbox", "close", box)
            with pytest.raises(httpx2.HTTPError):
                await http.get(site)
            assert process.stderr is not None
            assert await process.wait() == 1
            said = "".join([text async for text in TextReceiveStream(process.stderr)])
        assert f"nothing listens on its port {PORT}" in said
        assert "was closed" in said


async def test_only_the_owner_of_a_sandbox_reaches_its_ports_and_not_with_a_token_that_only_reads(tokens: Tokens):
    ann, bob, reader = tokens.create("ann"), tokens.create("bob"), tokens.create("reader", ("read",), owner="ann")
    async with terminal() as user:
        box = await user.output("sandbox", "create", token=ann)
        place = f"{user.url.removesuffix('/mcp')}/api/v1/sandboxes/{box}/ports/{PORT}".replace("http", "ws", 1)
        statuses = []
        for token in (ann, bob, reader):
            with pytest.raises(InvalidStatus) as refused:
                await connect(place, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None)
            statuses.append(refused.value.response.status_code)
        assert statuses == [409, 404, 403]  # nothing listens, no such sandbox, not allowed
