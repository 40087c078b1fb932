"""Ways to a network, to the host and to other sandboxes."""

import contextlib
import os
import socket
import threading

from .attempts import Attempts, read_text

CONNECT_S = 3.0
VSOCK_ADDRESSES = ((2, 1024), (2, 22), (1, 1024))  # the host, and the monitor

_listening: list[socket.socket] = []
_accepted: list[object] = []


def find_devices() -> Attempts:
    """Look for a network device other than the loopback."""
    found = Attempts()
    names = [line.split(":")[0].strip() for line in read_text("/proc/net/dev").splitlines() if ":" in line]
    with contextlib.suppress(OSError):
        names += os.listdir("/sys/class/net")
    with contextlib.suppress(OSError):
        names += [name for _, name in socket.if_nameindex()]
    for name in sorted(set(names)):
        found.note(f"device {name}", succeeded=name != "lo")
    return found


def find_routes() -> Attempts:
    """Look for a route and a name server."""
    found = Attempts()
    _header, *routes = read_text("/proc/net/route").splitlines() or [""]
    found.note(f"{len(routes)} routes", succeeded=bool(routes))
    found.note("a name server", succeeded="nameserver" in read_text("/etc/resolv.conf"))
    return found


def resolve_names() -> Attempts:
    """Try to resolve names: a question to a name server can carry data out."""
    found = Attempts()
    for name in ("example.com", "metadata.google.internal", "host.docker.internal"):
        found.action(name, socket.getaddrinfo, name, 80)
    return found


def connect(addresses: list[list[str | int]]) -> Attempts:
    """Try to connect to addresses, and to the host through virtual sockets."""
    found = Attempts()
    for host, port in addresses:
        family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
        found.action(f"{host} port {port}", _connect, family, (host, port))
    for cid, port in VSOCK_ADDRESSES:
        found.action(f"virtual socket {cid}:{port}", _connect, socket.AF_VSOCK, (cid, port))
    return found


def listen(port: int) -> Attempts:
    """Accept connections on a port for as long as this process lives. Only one to itself may succeed."""
    found = Attempts()
    server = socket.create_server(("", port))
    _listening.append(server)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                _accepted.append(server.accept()[1])

    threading.Thread(target=accept, daemon=True).start()
    _connect(socket.AF_INET, ("127.0.0.1", port))  # it listens
    found.note(f"port {port}", succeeded=False)
    return found


def count_visitors() -> Attempts:
    """Look whether anyone else has connected to the port."""
    found = Attempts()
    for number, address in enumerate(_accepted):
        found.note(f"a connection from {address}", succeeded=number > 0)
    return found


def _connect(family: int, address: tuple[object, ...]) -> None:
    with socket.socket(family) as probe:
        probe.settimeout(CONNECT_S)
        probe.connect(address)
