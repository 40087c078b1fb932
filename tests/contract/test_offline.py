"""A machine without a network cannot reach the web, its host, or another machine."""

import json
import socket

import anyio
import pytest

from tests.functional.machines import Clone, Machines
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

TRY_TO_CONNECT = """
import json, socket
def attempt(family, address):
    try:
        with socket.socket(family) as probe:
            probe.settimeout(3)
            probe.connect(address)
    except OSError as error:
        return type(error).__name__ + ": " + str(error)
    return "connected"
print(json.dumps([attempt(socket.{family}, address) for address in {addresses}]))
"""
LISTEN = """
import os, socket, threading
server = socket.create_server(("", {port}))
seen = []
def serve():
    while True:
        seen.append(server.accept()[1])
threading.Thread(target=serve, daemon=True).start()
print("listening")
"""


# A machine may hide some of the lists of devices.
NETWORK_DEVICES = """
import contextlib, json, os, socket
names = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
with contextlib.suppress(OSError):
    names += os.listdir("/sys/class/net")
with contextlib.suppress(OSError):
    names += [name for _, name in socket.if_nameindex()]
print(json.dumps(names))
"""


async def attempts(clone: Clone, addresses: list[tuple[object, ...]], family: str = "AF_INET") -> list[str]:
    code = TRY_TO_CONNECT.replace("{family}", family).replace("{addresses}", repr(addresses))
    answers: list[str] = json.loads((await clone.run(code)).out)
    return answers


async def test_a_machine_has_only_a_loopback_device(shared: Clone):
    found = json.loads((await shared.run(NETWORK_DEVICES)).out)
    assert set(found) == {"lo"}


async def test_a_machine_has_no_route_and_no_name_server(shared: Clone):
    routes = (await shared.run("print(open('/proc/net/route').read())")).out.splitlines()
    assert len(routes) <= 1  # the header
    assert "nameserver" not in (await shared.run("print(open('/etc/resolv.conf').read())")).out


async def test_a_machine_resolves_no_names(shared: Clone):
    ran = await shared.run(
        "import socket\n"
        "try:\n    print(socket.getaddrinfo('example.com', 80))\n"
        "except socket.gaierror as error:\n    print('gaierror')"
    )
    assert ran.out == "gaierror"


async def test_a_machine_cannot_reach_a_server_on_its_host(shared: Clone):
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        own = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        hosts = sorted({"127.0.0.1", "127.0.0.2", "10.0.2.2", "10.0.2.3", "169.254.169.254", *own})
        answers = await attempts(shared, [(host, port) for host in hosts])
        assert len(answers) == len(hosts)
        assert "connected" not in answers
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_a_machine_cannot_reach_its_host_through_a_virtual_socket(shared: Clone):
    assert "connected" not in await attempts(shared, [(2, 1024), (2, 22), (1, 1024)], family="AF_VSOCK")


async def test_a_machine_cannot_reach_another_machine(machines: Machines, shared: Clone):
    with anyio.fail_after(HANG_S):
        async with machines.clone() as other:
            assert (await other.run(LISTEN.format(port=7777))).out == "listening"
            assert await attempts(other, [("127.0.0.1", 7777)]) == ["connected"]  # it listens
            answers = await attempts(shared, [("127.0.0.1", 7777), ("10.0.2.15", 7777), ("224.0.0.1", 7777)])
            assert "connected" not in answers
            assert (await other.run("print(len(seen))")).out == "1"
