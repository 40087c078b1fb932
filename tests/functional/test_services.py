"""Templates with a service: it runs in every clone, and each clone has its own copy."""

from collections.abc import AsyncIterator

import anyio
import pytest

from mcp_sandbox.app import Host
from templates.build import BuiltTemplate
from templates.errors import BuildFailed
from templates.model import ServiceCommand, Template, Warmup
from templates.store import Store
from tests.functional.machines import Machines, only
from tests.waiting import BUILD_S

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


@pytest.fixture
async def counting(host: Host, built: BuiltTemplate) -> AsyncIterator[Machines]:
    """Machines of a template whose service counts its requests; ready_cmd was the first."""
    store = Store(host.settings.home)
    before = {entry.path for entry in store.entries()}
    template = with_service(built.template, f"exec python3 -c '{COUNTER}'", f'python3 -c "{COUNT}"')
    with anyio.fail_after(BUILD_S):
        machines = Machines(host, await host.builder.build(template, host.driver))
    yield machines
    await machines.assert_none_left()
    for entry in store.entries():
        if entry.path not in before:
            await store.remove(entry.kind, entry.key)


@only("gvisor", "bubblewrap")
async def test_a_service_runs_in_every_clone_and_outlives_the_kernel(counting: Machines):
    async with counting.clone() as one, counting.clone() as other:
        assert [(await one.run(COUNT)).out for _ in range(3)] == ["2", "3", "4"]
        assert (await other.run(COUNT)).out == "2"
        assert (await one.run("import os; os.kill(os.getpid(), 9)")).end.state == "lost"
        assert (await one.run(COUNT)).out == "5"


@only("gvisor")
async def test_a_build_whose_service_does_not_start_shows_its_last_output(host: Host, built: BuiltTemplate):
    with anyio.fail_after(BUILD_S), pytest.raises(BuildFailed, match=r"start_cmd ended \(exit code 1\)(?s:.*)no disk"):
        await host.builder.build(with_service(built.template, "echo no disk; exit 1", "false"), host.driver)
