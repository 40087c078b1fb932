"""Templates with a service: it runs in every clone, and each clone has its own copy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.app import Host
from templates.build import BuiltTemplate
from templates.errors import BuildFailed
from templates.model import ServiceCommand, Template, Warmup
from templates.store import Store
from tests.functional.machines import Machines, only
from tests.waiting import BUILD_S
from tests.web.sites import Page, pages
from tests.web.world import World, forget_proxies
from vmm.types import NetworkMode
from websearch.access import Caller

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


COUNTER = """
import itertools, socketserver
numbers = itertools.count(1)
class Counter(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"%d" % next(numbers))
socketserver.TCPServer(("127.0.0.1", 7000), Counter).serve_forever()
"""
COUNT = "import socket; print(socket.create_connection(('127.0.0.1', 7000)).recv(20).decode())"


def with_service(template: Template, start_cmd: str, ready_cmd: str) -> Template:
    service = ServiceCommand(start_cmd=start_cmd, ready_cmd=ready_cmd)
    return template.model_copy(update={"name": "test-service", "warmup": Warmup(), "service": service})


# Fetches the address that it is sent, as its environment says.
FETCHER = """
import socketserver, urllib.request
class Fetcher(socketserver.StreamRequestHandler):
    def handle(self):
        url = self.rfile.readline().decode().strip()
        self.wfile.write(urllib.request.urlopen(url).read() if url else b"ready")
socketserver.TCPServer(("127.0.0.1", 7000), Fetcher).serve_forever()
"""
FETCH = """
import socket
with socket.create_connection(("127.0.0.1", 7000)) as peer:
    peer.sendall(b"{url}\\n")
    print(peer.recv(100).decode())
"""


@asynccontextmanager
async def serving(host: Host, built: BuiltTemplate, start_cmd: str, ready_cmd: str) -> AsyncIterator[Machines]:
    """Machines of a template with a service, which is built and removed."""
    store = Store(host.settings.home)
    before = {entry.path for entry in store.entries()}
    template = with_service(built.template, start_cmd, ready_cmd)
    with anyio.fail_after(BUILD_S):
        machines = Machines(host, await host.builder.build(template, host.driver))
    yield machines
    await machines.assert_none_left()
    for entry in store.entries():
        if entry.path not in before:
            await store.remove(entry.kind, entry.key)


@pytest.fixture
async def counting(host: Host, built: BuiltTemplate) -> AsyncIterator[Machines]:
    """Machines of a template whose service counts its requests; ready_cmd was the first."""
    async with serving(host, built, f"exec python3 -c '{COUNTER}'", f'python3 -c "{COUNT}"') as machines:
        yield machines


@only("gvisor", "bubblewrap")
async def test_a_service_runs_in_every_clone_and_outlives_the_kernel(counting: Machines):
    async with counting.clone() as one, counting.clone() as other:
        assert [(await one.run(COUNT)).out for _ in range(3)] == ["2", "3", "4"]
        assert (await other.run(COUNT)).out == "2"
        assert (await one.run("import os; os.kill(os.getpid(), 9)")).end.state == "lost"
        assert (await one.run(COUNT)).out == "5"


@only("gvisor", "bubblewrap")
async def test_a_service_reaches_a_site_through_the_proxy_of_its_sandbox(
    host: Host, built: BuiltTemplate, monkeypatch: pytest.MonkeyPatch
):
    forget_proxies(monkeypatch)
    world = World()

    async def serve(stream: ByteStream) -> None:
        await world.bridge().serve(stream, Caller("ada", "sb-1"))

    ready_cmd = 'python3 -c \'import socket; socket.create_connection(("127.0.0.1", 7000)).sendall(b"\\n")\''
    async with (
        world.site("site.test", pages({"/": Page(b"hello")})) as url,
        serving(host, built, f"exec python3 -c '{FETCHER}'", ready_cmd) as machines,
        machines.clone(NetworkMode.PROXY, serve) as clone,
    ):
        assert (await clone.run(FETCH.format(url=f"{url}/"))).out == "hello"


@only("gvisor")
async def test_a_build_whose_service_does_not_start_shows_its_last_output(host: Host, built: BuiltTemplate):
    with anyio.fail_after(BUILD_S), pytest.raises(BuildFailed, match=r"start_cmd ended \(exit code 1\)(?s:.*)no disk"):
        await host.builder.build(with_service(built.template, "echo no disk; exit 1", "false"), host.driver)
