"""Stands in for a monitor: its API and its vsock, without a machine. It logs each request as a line of JSON.

    fake_monitor.py KIND FILES BEHAVIOUR

KIND is the driver. FILES maps the names that the monitor knows to open descriptors. BEHAVIOUR names the log, may refuse
(some times) or die at a path, and says how often no agent listens on the guest's port, the guest does not answer, or it
accepts a connection and closes it. The agent of this machine is an echo.
"""

import json
import os
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

PAGE = 4096
MIB = 1024 * 1024
FIRECRACKER = "firecracker"

kind: str = sys.argv[1]
files: dict[str, int] = json.loads(sys.argv[2])
behaviour: dict[str, Any] = json.loads(sys.argv[3])
place = str(behaviour["root"])  # in place of a root directory of its own
connections: list[socket.socket] = []
saved: list[object] = []
refused: list[object] = []
unresumed: list[object] = []  # snapshots since the machine last went on
gated: list[object] = []  # it went on without one: Firecracker 1.16 then holds back all data for the guest


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if self.command != "GET":
            with Path(behaviour["log"]).open("a") as log:
                log.write(json.dumps([self.command, self.path, body]) + "\n")
        if behaviour.get("die") == self.path:
            os._exit(7)
        if behaviour.get("refuse") == self.path and len(refused) < int(behaviour.get("times", sys.maxsize)):
            refused.append(body)
            why = ["it failed", "it is refused"] if kind != FIRECRACKER else {"fault_message": "it is refused"}
            self.reply(400, "a" * behaviour["chatter"] if "chatter" in behaviour else behaviour.get("fault", why))
            return
        if self.path == "/snapshot/create":
            save_changes(body)
        if self.path == "/api/v1/vm.snapshot":
            save_all()
        if self.path == "/vm" and body == {"state": "Resumed"}:
            gated.extend([] if unresumed else [body])
            unresumed.clear()
        self.reply(204, None)
        if behaviour.get("boots") == self.path:
            print(behaviour["word"], flush=True)  # the console of the machine
            os._exit(0)

    do_GET = do_PUT = do_PATCH = answer  # noqa: N815 - names of http.server

    def reply(self, status: int, body: object) -> None:
        data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return ""


def save_changes(body: Any) -> None:
    """Save a machine as Firecracker does, which uses four pages. Each change is saved only once."""
    pages = 4
    memory, size = files[body["mem_file_path"]], int(behaviour["memory_mb"]) * MIB - int(behaviour.get("short", 0))
    if os.fstat(memory).st_size != size:  # else changes are written over what is there
        os.ftruncate(memory, 0)
        os.ftruncate(memory, size)
    saved.append(body)
    unresumed.append(body)
    full = body["snapshot_type"] == "Full"
    for page in range(pages) if full else [len(saved)]:
        os.pwrite(memory, (b"a" if full else changed(len(saved))) * PAGE, page * PAGE)
    os.pwrite(files[body["snapshot_path"]], b"state".ljust(int(behaviour.get("state_bytes", 0))), 0)
    for connection in connections:  # a snapshot ends them
        connection.shutdown(socket.SHUT_RDWR)
    connections.clear()


def changed(times: int) -> bytes:
    """Return the content of the page that has changed: first it is cleared, then written to."""
    return b"\0" if times == 1 else b"c"


def save_all() -> None:
    """Save a machine as Cloud Hypervisor does, which creates its files."""
    new, size = Path(place) / "new", int(behaviour["memory_mb"]) * MIB
    manager = {
        "memory_ranges": {"data": [{"gpa": 0, "length": size}]},
        "guest_ram_mappings": [{"slot": 0, "gpa": 0, "size": size, "zone_id": "memory", "file_offset": 0}],
        "boot_ram": size,
    }
    state = {"snapshots": {"memory-manager": {"snapshots": {}, "snapshot_data": {"state": json.dumps(manager)}}}}
    with (new / "config.json").open("x") as file:
        file.write('{"landlock_enable": "whatever it likes"}')
    with (new / "state.json").open("x") as file:
        file.write((behaviour.get("state") or json.dumps(state)).ljust(int(behaviour.get("state_bytes", 0))))
    if behaviour.get("folder"):
        (new / "memory-ranges").mkdir()
        return
    if target := behaviour.get("link"):
        (new / "memory-ranges").symlink_to(target)
        return
    with (new / "memory-ranges").open("xb") as file:
        file.truncate(size - int(behaviour.get("short", 0)))
        file.write(b"memory")


def serve_vsock() -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{place}/mcp-sandbox-agent")
    listening.listen()
    refusals, unanswered = int(behaviour.get("deaf", 0)), int(behaviour.get("silent", 0))
    resets = int(behaviour.get("resets", 0))
    ignored: list[socket.socket] = []
    while True:
        connection, _ = listening.accept()
        if gated or unanswered > len(ignored):
            ignored.append(connection)
            continue
        line = connection.makefile("rb").readline()
        if refusals:
            refusals -= 1
            connection.close()
            continue
        connection.sendall(behaviour.get("greeting", "OK 1073741824").encode() + b"\n")
        if resets:
            resets -= 1
            connection.close()
            continue
        connections.append(connection)
        threading.Thread(target=echo, args=(connection, line), daemon=True).start()


def echo(connection: socket.socket, line: bytes) -> None:
    connection.sendall(line)
    while data := connection.recv(PAGE):
        connection.sendall(data)
    with suppress(OSError):  # a snapshot has ended it
        connection.shutdown(socket.SHUT_RDWR)


print(behaviour.get("prints", ""), flush=True)
if behaviour.get("die") == "start":
    sys.exit("cannot start")
threading.Thread(target=serve_vsock, daemon=True).start()
Handler.protocol_version = "HTTP/1.1"
with socketserver.ThreadingUnixStreamServer(f"{place}/mcp-sandbox-api", Handler) as server:
    server.serve_forever()
