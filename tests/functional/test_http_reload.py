"""SIGHUP for a server that runs: it reads its certificate again and asks for tokens once there are any."""

import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import httpx2
import trustme
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.accounts.tokens import Tokens
from tests.functional.checkout import REPO
from tests.functional.mcp_client import SERVER, server_environment
from tests.waiting import HANG_S


class Server:
    """A server in a session of its own, so without a terminal."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self.process = process
        self._log = BufferedByteReceiveStream(process.stderr)

    async def said(self, words: str) -> str:
        """Wait for a line with these words."""
        while True:
            line = (await self._log.receive_until(b"\n", 1 << 16)).decode()
            if words in line:
                return line

    async def reload(self) -> str:
        self.process.send_signal(signal.SIGHUP)
        return await self.said("reload")


@asynccontextmanager
async def serving(home: Path, **settings: object) -> AsyncIterator[tuple[Server, str]]:
    environment = server_environment(pool_max=0, home=home, **settings)
    command = [sys.executable, *SERVER, "serve", "--port", "0"]
    with anyio.fail_after(HANG_S):
        async with await anyio.open_process(
            command, cwd=REPO, env=environment, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            server = Server(process)
            try:
                line = await server.said("serving ")
                yield server, line.partition("serving ")[2].partition("/mcp,")[0]
            finally:
                process.terminate()


async def test_a_server_asks_for_tokens_once_there_are_any_and_never_opens_again(tmp_path: Path):
    async with serving(tmp_path) as (server, address), httpx2.AsyncClient(base_url=address, timeout=HANG_S) as http:
        assert (await http.get("/api/v1/sandboxes")).status_code == 200
        with closing(Tokens(tmp_path)) as tokens:
            secret = tokens.create("ana")
            assert "with a token only" in await server.reload()
            assert (await http.get("/api/v1/sandboxes")).status_code == 401
            headers = {"Authorization": f"Bearer {secret}"}
            assert (await http.get("/api/v1/sandboxes", headers=headers)).status_code == 200
            tokens.revoke("ana")
        await server.reload()
        assert (await http.get("/api/v1/sandboxes")).status_code == 401


async def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path):
    pem = tmp_path / "server.pem"

    def issue() -> ssl.SSLContext:
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        return trusting

    async def status(trusting: ssl.SSLContext) -> int:
        async with httpx2.AsyncClient(verify=trusting, timeout=HANG_S) as http:
            return (await http.get(f"{address}/healthz")).status_code

    old = issue()
    async with serving(tmp_path, serve_certificate=pem, serve_key=pem) as (server, address):
        assert await status(old) == 200
        new = issue()
        await server.reload()
        assert await status(new) == 200
        pem.write_text("no certificate")
        assert "goes on as before" in await server.reload()
        assert await status(new) == 200
