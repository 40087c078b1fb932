"""Stands in for Firecracker: its API and its vsock, without a machine. It logs each request as a line of JSON.

    fake_firecracker.py FILES BEHAVIOUR

FILES maps the names that Firecracker knows to open descriptors. BEHAVIOUR names the log, may refuse or die at a path,
and says how often no agent listens on the guest's port. The agent of this machine echoes what it gets.
"""

import json
import os
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

PAGE = 4096
MEMORY_PAGES = 4

files: dict[str, int] = json.loads(sys.argv[1])
behaviour: dict[str, object] = json.loads(sys.argv[2])
place = str(behaviour["root"])  # in place of a root directory of its own
connections: list[socket.socket] = []
saved: list[object] = []


def write(name: str, at: int, data: bytes) -> None:
    os.pwrite(files[name], data, at)


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if self.path != "/version":
            with Path(str(behaviour["log"])).open("a") as log:
                log.write(json.dumps([self.command, self.path, body]) + "\n")
        if behaviour.get("die") == self.path:
            os._exit(7)
        if behaviour.get("refuse") == self.path:
            self.reply(400, {"fault_message": "it is refused"})
            return
        if self.path == "/snapshot/create":
            self.save(body)
        self.reply(204, None)

    do_GET = do_PUT = do_PATCH = answer  # noqa: N815 - names of http.server

    def save(self, body: Any) -> None:
        memory = files[body["mem_file_path"]]
        os.ftruncate(memory, 0)
        os.ftruncate(memory, MEMORY_PAGES * PAGE)
        saved.append(body)
        number = len(saved)
        pages = range(MEMORY_PAGES) if body["snapshot_type"] == "Full" else [number]  # each change is saved only once
        for page in pages:
            write(
                body["mem_file_path"],
                page * PAGE,
                (b"a" if body["snapshot_type"] == "Full" else bytes([97 + number])) * PAGE,
            )
        write(body["snapshot_path"], 0, b"state")
        for connection in connections:  # a snapshot ends them
            connection.shutdown(socket.SHUT_RDWR)
        connections.clear()

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode() if body else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return ""


def serve_vsock() -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{place}/mcp-sandbox-agent")
    listening.listen()
    refusals = int(str(behaviour.get("deaf", 0)))
    while True:
        connection, _ = listening.accept()
        line = connection.makefile("rb").readline()
        if refusals:
            refusals -= 1
            connection.close()
            continue
        connection.sendall(str(behaviour.get("greeting", "OK 1073741824")).encode() + b"\n")
        connections.append(connection)
        threading.Thread(target=echo, args=(connection, line), daemon=True).start()


def echo(connection: socket.socket, line: bytes) -> None:
    connection.sendall(line)
    while data := connection.recv(PAGE):
        connection.sendall(data)


if behaviour.get("die") == "start":
    sys.exit("cannot start")
threading.Thread(target=serve_vsock, daemon=True).start()
with socketserver.ThreadingUnixStreamServer(f"{place}/mcp-sandbox-api", Handler) as server:
    Handler.protocol_version = "HTTP/1.1"
    server.serve_forever()
