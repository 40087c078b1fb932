"""A bridge in namespaces of its own, with a name server that changes its mind: prints what became of requests, as JSON.

Nothing is handed to the bridge: it asks the C library, which asks the server that /etc/resolv.conf names. The one
public site is at an address of this namespace's loopback device.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from anyio.abc import ByteStream, UNIXSocketStream
from pyroute2 import IPRoute

from tests.web.name_server import NameServer, serving_names
from tests.web.sites import GONE, answering
from websearch.access import Access, Caller
from websearch.bridge import Bridge
from websearch.policy import Policy
from websearch.quotas import Ledger, Quotas

PUBLIC, LOOPBACK = "93.184.216.34", "127.0.0.1"
RESOLVER = "127.0.0.53"
HTTP = 80
NAMES = {"rebinding.example": [PUBLIC, LOOPBACK], "site.example": [PUBLIC], "inside.example": [LOOPBACK]}
ASKED = ("rebinding.example", "rebinding.example", "site.example", "inside.example", "unknown.example")


def enter(folder: Path) -> None:
    """Bring this namespace's loopback device up, and name its own name server."""
    with IPRoute() as netlink:
        (lo,) = netlink.link_lookup(ifname="lo")
        netlink.link("set", index=lo, state="up")
        netlink.addr("add", index=lo, address=PUBLIC, prefixlen=32)
    for path, text in (("resolv.conf", f"nameserver {RESOLVER}\n"), ("nsswitch.conf", "hosts: files dns\n")):
        (folder / path).write_text(text)
        subprocess.run(["mount", "--bind", str(folder / path), str(Path("/etc", path).resolve())], check=True)


async def ask(bridge: Bridge, host: str) -> str:
    """Return what comes back for a page of a host."""
    guest, ours = [await UNIXSocketStream.from_socket(end) for end in socket.socketpair()]
    answer = b""
    async with guest, anyio.create_task_group() as tasks:
        tasks.start_soon(bridge.serve, ours, Caller("ada", "sb-1"))
        await guest.send(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        try:
            async for data in guest:
                answer += data
        except GONE:
            pass
    return answer.decode().rpartition("\r\n\r\n")[2]


async def main(server: NameServer) -> None:
    accesses: list[Access] = []
    inside: list[bytes] = []
    bridge = Bridge(Policy(), Ledger(Quotas()), on_access=accesses.append)
    public = await anyio.create_tcp_listener(local_host=PUBLIC, local_port=HTTP)
    private = await anyio.create_tcp_listener(local_host=LOOPBACK, local_port=HTTP)

    async def secret(stream: ByteStream) -> None:
        inside.append(b"a connection")
        await stream.aclose()

    async with public, private, anyio.create_task_group() as tasks:
        tasks.start_soon(public.serve, answering(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npublic"))
        tasks.start_soon(private.serve, secret)
        answers = [await ask(bridge, host) for host in ASKED]
        tasks.cancel_scope.cancel()
    rules = [access.verdict.rule for access in accesses]
    json.dump({"answers": answers, "rules": rules, "asked": server.asked, "inside": len(inside)}, sys.stdout)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        enter(Path(folder))
        server = NameServer(NAMES)
        with serving_names(server, RESOLVER):
            anyio.run(main, server)
