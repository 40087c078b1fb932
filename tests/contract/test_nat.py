"""Network mode `nat`: a machine reaches the internet and nothing else, and leaves nothing on its host."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider, start
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.machines.unique import new_identity
from tests.functional.machines import Clone, Machines, only, run
from tests.nat_world import HOST, PORT, SITE, World, open_world
from tests.waiting import HANG_S, assert_soon_empty, promised
from vmm.driver import Driver
from vmm.errors import NetworkUnsupported
from vmm.network.nat import Nat
from vmm.network.plan import LINKS
from vmm.process import find_tool
from vmm.types import NetworkMode

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network devices"),
    pytest.mark.skipif(find_tool("nft") is None, reason="nftables is not installed"),
]
BOTH = ("gvisor", "bubblewrap")
ALL = (*BOTH, "qemu")

INTRANET = "10.9.0.0/16"  # the operator has named it
ASK = """
import socket
def ask(address, port=PORT):
    try:
        with socket.create_connection((address, port), 30) as peer:
            return peer.recv(100).decode()
    except OSError as error:
        return type(error).__name__ if type(error) is not OSError else error.strerror
""".replace("PORT", str(PORT))
SERVE = """
import threading
server = socket.create_server(("0.0.0.0", 8000))
def serve():
    while True:
        server.accept()[0].sendall(b"two")
threading.Thread(target=serve, daemon=True).start()
"""
# With the addresses at which clouds serve credentials. Their networks are among those that the operator has named here.
REFUSED = [
    *("10.1.2.3", "10.255.255.254", "172.16.0.1", "172.31.9.9", "192.168.1.1", "100.64.0.1", "100.127.255.254"),
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    *("192.0.2.7", "198.51.100.7", "203.0.113.7", "192.88.99.1", "192.0.0.8"),
]
# Root in the machine's network namespace can send what no process of the machine can.
FORGE = f"""
import socket
for source in ("23.0.0.7", "10.1.1.1", "198.18.7.7", "{HOST}", None):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        if source:
            sender.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
            sender.bind((source, 0))
        sender.sendto(b"forged" if source else b"genuine", ("{SITE}", 9))
"""
OWN_ADDRESS = f"print(socket.create_connection(('{SITE}', {PORT})).getsockname()[0])"
REFUSAL = "No route to host"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # The last two are not to be named, but they do not let a machine reach a metadata service or another machine.
    with open_world(INTRANET, "169.254.0.0/16", str(LINKS)) as world:
        yield world


@pytest.fixture
def driver(machines: Machines, world: World, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver as on a host whose operator allows `nat`."""
    host = machines.host
    monkeypatch.setattr(host.driver, "_nat", Nat(world.config, host.settings.run_dir))
    return host.driver


@asynccontextmanager
async def connected(driver: Driver, machines: Machines) -> AsyncIterator[Clone]:
    identity = new_identity(network=NetworkMode.NAT)
    with anyio.fail_after(HANG_S):
        async with start(driver, machines.built, identity, NetworkMode.NAT) as (machine, agent):
            machines._note(machine)
            await run(agent, ASK)
            yield Clone(machine, agent)


@only(*ALL)
async def test_a_machine_reaches_the_internet_and_its_host_and_private_networks_refuse(
    driver: Driver, machines: Machines, world: World
):
    for address in ("10.1.2.3", "169.254.169.254"):
        assert world.reached_from_host(address) == f"world sees {HOST}"  # they are there
    async with connected(driver, machines) as clone:
        assert (await clone.run(f"print(ask('{SITE}'))")).out == f"world sees {HOST}"
        assert (await clone.run("print(ask('some.example'))")).out == f"world sees {HOST}"  # by its name
        assert (await clone.run("print(ask('10.9.8.7'))")).out == f"world sees {HOST}"  # the operator has named it
        ran = await clone.run(f"print([address for address in {REFUSED} if ask(address) != {REFUSAL!r}])")
        assert ran.out == "[]"
        address = (await clone.run(OWN_ADDRESS)).out
        gateway = address.rpartition(".")[0] + f".{int(address.rpartition('.')[2]) - 1}"
        ran = await clone.run(f"print([ask(address) for address in ('{HOST}', '{gateway}')])")
        assert ran.out == str([REFUSAL] * 2)  # though both are its host, and a server listens there
        ran = await clone.run("print(socket.has_ipv6 and ask('2606:4700::1111'))")
        assert ran.out in ("Network is unreachable", "Cannot assign requested address", REFUSAL)
    await assert_soon_empty(world.leftovers, promised())


@only(*BOTH)
async def test_two_machines_do_not_reach_each_other(driver: Driver, machines: Machines, world: World):
    async with connected(driver, machines) as one, connected(driver, machines) as two:
        assert len(world.links()) == 2
        await two.run(SERVE)
        address = (await two.run(OWN_ADDRESS)).out
        assert (await two.run(f"print(ask('{address}', 8000))")).out == "two"
        assert (await one.run(f"print(ask('{address}', 8000))")).out == REFUSAL
        assert (await one.run(f"print(ask('{SITE}'))")).out == f"world sees {HOST}"


@only("gvisor", "qemu")
async def test_a_copy_of_a_machine_has_its_own_link(driver: Driver, machines: Machines, world: World):
    builds = Builds(driver, machines.host.builder, machines.host.settings.catalogue)
    provider = LocalProvider(driver, builds, max_restores=4, run_dir=machines.host.settings.run_dir)
    request = MachineRequest(machines.built.template.name, network=NetworkMode.NAT)
    with anyio.fail_after(HANG_S):
        async with provider.acquire(request) as original:
            await run(original.agent, ASK)
            async with provider.freeze(original) as frozen, provider.thaw(frozen, copy=True) as copy:
                for lease in (original, copy):
                    assert (await run(lease.agent, "print(ask('some.example'))")).out == f"world sees {HOST}"
                assert len(world.links()) == 2


@only("bubblewrap")
async def test_packets_with_another_address_do_not_leave_the_host(driver: Driver, machines: Machines, world: World):
    async with connected(driver, machines) as clone:
        with ThreadPoolExecutor(1) as thread, world.listening() as packets:
            send = ["nsenter", f"--net=/proc/{clone.pid}/ns/net", sys.executable, "-c", FORGE]
            thread.submit(subprocess.run, send, check=True).result()
            seen = b""
            while b"genuine" not in seen:  # it was sent after the others
                seen += packets.recv(2000)
            assert b"forged" not in seen


@pytest.mark.parametrize("after_ms", [0, 20, 50, 100, 150, 200, 300])
@only(*BOTH)
async def test_a_cancelled_start_leaves_no_link_and_no_table(
    driver: Driver, machines: Machines, world: World, after_ms: int
):
    with anyio.move_on_after(after_ms / 1000):
        async with connected(driver, machines):
            pass
    await assert_soon_empty(world.leftovers, promised())


@only(*BOTH)
async def test_a_host_that_does_not_allow_it_refuses(machines: Machines):
    spec = machines.built.spec("refused", NetworkMode.NAT)
    with pytest.raises(NetworkUnsupported, match="allow_nat"):
        async with machines.host.driver.launch(spec):
            pass
