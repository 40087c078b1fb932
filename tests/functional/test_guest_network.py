"""This host's own npm and go through a real agent's tunnel and the bridge: no built-in template contains both."""

import base64
import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import Identity, WarmUp
from tests.functional.guest_harness import agent_client, command
from tests.waiting import HANG_S
from tests.web.sites import Page, pages
from tests.web.world import World, forget_proxies
from websearch.access import Caller

MODULE = "module.test/greeting"
GO = shutil.which("go", path="/usr/bin:/usr/local/go/bin")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    forget_proxies(monkeypatch)
    return World()


@pytest.fixture
async def machine(world: World) -> AsyncIterator[AgentClient]:
    """An agent in network mode `proxy`. The bridge is made when a stream comes: then it knows all ports."""

    async def serve(stream: ByteStream) -> None:
        await world.bridge().serve(stream, Caller("ada", "sb-1"))

    with anyio.fail_after(HANG_S):
        async with agent_client(WarmUp("shell"), serve_stream=serve) as client:
            await client.refresh(Identity("clone", "f" * 32, bytes(32), "proxy", reseed=False))
            yield client


def npm_package() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, text in (
            ("package.json", '{"name": "greeting", "version": "1.0.0", "main": "index.js"}'),
            ("index.js", "module.exports = 'hello from npm'\n"),
        ):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return data.getvalue()


def registry(tarball: bytes, url: str) -> dict[str, Page]:
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    dist = {"tarball": f"{url}/greeting.tgz", "integrity": integrity}
    versions = {"1.0.0": {"name": "greeting", "version": "1.0.0", "dist": dist}}
    about = {"name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": versions}
    return {"/greeting": Page(json.dumps(about).encode()), "/greeting.tgz": Page(tarball)}


@pytest.mark.skipif(not shutil.which("npm", path="/usr/bin"), reason="npm is not in /usr/bin")
async def test_npm_installs_a_package(machine, world):
    shown: dict[str, Page] = {}
    async with world.site("registry.test", pages(shown)) as url:
        shown |= registry(npm_package(), url)
        options = f"--no-audit --no-fund --fetch-retries 0 --registry {url}"
        assert "added 1 package" in (await command(machine, f"npm install {options} greeting 2>&1")).stdout
        assert (await command(machine, "node -p 'require(\"greeting\")'")).stdout == "hello from npm\n"
    assert {access.target for access in world.accesses} == {url.removeprefix("http://")}


def go_module() -> dict[str, Page]:
    """Return a module as a module proxy serves it."""
    data = io.BytesIO()
    mod = f"module {MODULE}\n\ngo 1.20\n"
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(f"{MODULE}@v1.0.0/go.mod", mod)
        archive.writestr(f"{MODULE}@v1.0.0/greeting.go", 'package greeting\n\nconst Text = "hello from go"\n')
    place = f"/{MODULE}/@v"
    return {
        f"{place}/list": Page(b"v1.0.0\n"),
        f"{place}/v1.0.0.info": Page(b'{"Version": "v1.0.0"}'),
        f"{place}/v1.0.0.mod": Page(mod.encode()),
        f"{place}/v1.0.0.zip": Page(data.getvalue()),
    }


@pytest.mark.skipif(not GO, reason="go is not below /usr")
async def test_go_downloads_a_module(machine, world):
    async with world.site("modules.test", pages(go_module())) as url:
        get = f"GOPROXY={url} GONOSUMDB=* GOFLAGS=-mod=mod {GO} get {MODULE}@v1.0.0"
        result = await command(machine, f"{GO} mod init example 2>/dev/null; {get} 2>&1; cat go.mod")
        assert f"require {MODULE} v1.0.0" in result.stdout, result.stdout
    assert {access.target for access in world.accesses} == {url.removeprefix("http://")}
