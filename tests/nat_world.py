"""A small internet for tests of network mode `nat`: two network namespaces without names, which end with a process.

    machine ── host ── world

`host` stands for this host: it forwards, and its only way out is the world. The world answers at every address. Both
run a server on port 80 that says who asks, and a name server that knows one address for every name.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyroute2 import IPRoute

from mcp_sandbox.config import Settings
from mcp_sandbox.machines.nat import nat_config
from tests.waiting import HANG_S
from vmm.network.links import in_namespace
from vmm.network.plan import LINK_PREFIX, NatConfig

HOST, WORLD = "23.0.0.1", "23.0.0.2"  # the two ends of the wire between them
RESOLVER = "23.1.1.1"
SITE = "23.2.2.2"  # what every name stands for
PORT = 80
ALL_PACKETS = 3  # ETH_P_ALL

SERVER = f"""
import socket, socketserver, sys, threading
class Web(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(f"{{sys.argv[1]}} sees {{self.client_address[0]}}".encode())
class Names(socketserver.BaseRequestHandler):
    def handle(self):
        query, server = self.request
        end = query.index(b"\\0", 12) + 5
        is_a = query[end - 4 : end - 2] == b"\\0\\1"
        record = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x3c\\0\\4" + socket.inet_aton("{SITE}") if is_a else b""
        header = query[:2] + b"\\x81\\x80\\0\\1" + (b"\\0\\1" if is_a else b"\\0\\0") + b"\\0\\0\\0\\0"
        # From the address that was asked: the kernel would choose another.
        answer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        answer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        answer.bind(("{RESOLVER}", 53))
        answer.sendto(header + query[12:end] + record, self.client_address)
class Threaded(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
sys.stdout.write("ready\\n"), sys.stdout.flush(), sys.stdin.readline()
socketserver.UDPServer.allow_reuse_address = True
web, names = Threaded(("0.0.0.0", {PORT}), Web), socketserver.UDPServer(("0.0.0.0", 53), Names)
threading.Thread(target=web.serve_forever, daemon=True).start()
threading.Thread(target=names.serve_forever, daemon=True).start()
sys.stdout.write("serving\\n"), sys.stdout.flush(), sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class World:
    """The namespaces, and what a driver is told about them."""

    host: str  # the file of its namespace
    config: NatConfig

    def reached_from_host(self, address: str) -> str:
        """What the server at an address answers to the host itself: nothing there refuses anything."""
        ask = f"import socket; print(socket.create_connection(({address!r}, {PORT}), 30).recv(100).decode())"
        argv = ["nsenter", f"--net={self.host}", sys.executable, "-c", ask]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    def links(self) -> list[str]:
        """The links of machines that the host has."""
        lines = (Path(self.host).parents[1] / "net" / "dev").read_text().splitlines()
        names = [line.partition(":")[0].strip() for line in lines]
        return [name for name in names if name.startswith(LINK_PREFIX)]

    def tables(self) -> list[str]:
        """The nftables tables that the host has."""
        argv = ["nsenter", f"--net={self.host}", "nft", "list", "tables"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """A socket that gets all packets between host and world."""
        with in_namespace(self.host):
            packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PACKETS))
            packets.bind(("up", ALL_PACKETS))
        packets.settimeout(HANG_S)
        with packets:
            yield packets

    def leftovers(self) -> list[str]:
        return [*self.links(), *self.tables()]


@contextmanager
def open_world(*allowed: str) -> Iterator[World]:
    """Make the namespaces. `allowed` are private networks that the operator has named."""
    with _namespace("host") as host, _namespace("world") as world:
        with ThreadPoolExecutor(1) as thread:  # netlink has its own event loop, and this thread may run one
            thread.submit(_wire, _file(host), _file(world)).result()
        for server in (host, world):
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("go\n")
            server.stdin.flush()
            assert server.stdout.readline() == "serving\n"
        yield World(_file(host), replace(config_of(*allowed), uplink=_file(host)))


def config_of(*allowed: str) -> NatConfig:
    """What drivers are told when the operator allows `nat` and names these private networks."""
    network = {"private_networks": {f"net{number}": net for number, net in enumerate(allowed)}, "resolvers": [RESOLVER]}
    config = nat_config(Settings.model_validate({"allow_nat": True, "network": network}))
    assert config is not None
    return config


def _wire(host: str, world: str) -> None:
    target = os.open(world, os.O_RDONLY)
    with in_namespace(host), IPRoute() as netlink:
        netlink.link("add", ifname="up", kind="veth", peer={"ifname": "down", "net_ns_fd": target})
        _raise(netlink, "up", HOST)
        _raise(netlink, "lo")
        netlink.route("add", dst="default", gateway=WORLD)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    os.close(target)
    with in_namespace(world), IPRoute() as netlink:
        _raise(netlink, "down", WORLD)
        lo = _raise(netlink, "lo")
        netlink.route("add", dst="0.0.0.0/0", type="local", scope="host", oif=lo, table=255)  # every address is its own


def _raise(netlink: IPRoute, name: str, address: str | None = None) -> int:
    (index,) = netlink.link_lookup(ifname=name)
    if address is not None:
        netlink.addr("add", index=index, address=address, prefixlen=24)
    netlink.link("set", index=index, state="up")
    return int(index)


@contextmanager
def _namespace(name: str) -> Iterator[subprocess.Popen[str]]:
    argv = ["unshare", "--net", sys.executable, "-c", SERVER, name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"  # it is in its namespace
            yield server
        finally:
            server.kill()


def _file(server: subprocess.Popen[str]) -> str:
    return f"/proc/{server.pid}/ns/net"
