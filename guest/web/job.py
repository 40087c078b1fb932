"""One job in one process: waits for it, does it, answers, ends."""

import json
import os
import random
import select
import signal
import socket
import ssl
import time
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from guest.jobs import JOB, MAX_JOB, PREFACE
from guest.prctl import set_dumpable
from guest.web.client import Proxy, open_client
from guest.web.errors import WebError
from guest.web.kinds import KINDS, read
from guest.web.offline import Reader, Reading, Result, pack
from guest.web.rehearsal import rehearse_fetching, rehearse_reading
from guest.web.workers import BUSY, READY, Tell

RETRY_S = 0.02  # between two tries to connect: a machine without its lease has no tunnel yet
GRACE_S = 5.0  # for the answer of a job that used its time up
ENTROPY = 32  # bytes


class Places(NamedTuple):
    """Where the tunnel listens, for jobs and for their connections."""

    jobs: str
    proxy: Proxy


def serve_job(places: Places, tls: ssl.SSLContext, tell: Tell) -> None:
    """Take one job from the host and answer it, with a second process that reads what this one downloads."""
    set_dumpable(dumpable=False)  # other jobs have the same user, and must not read this one's memory
    with Reader(read, rehearse_reading) as reader:
        rehearse_fetching(tls)
        reader.wait()
        tell(READY)
        with connect(places.jobs) as stream:
            stream.sendall(PREFACE)
            job = receive_job(stream, reader)
            if job is None:
                return
            tell(BUSY)
            end_with(stream)
            header, body = perform(job, places.proxy, tls, reader)
            stream.sendall(pack(header, body))
            stream.sendall(body)
            stream.shutdown(socket.SHUT_WR)


def connect(path: str) -> socket.socket:
    """Connect to the tunnel, as soon as there is one."""
    while True:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(path)
        except OSError:
            stream.close()
            time.sleep(RETRY_S)
        else:
            return stream


def receive_job(stream: socket.socket, reader: Reader) -> dict[str, Any] | None:
    """Return the job that the host sends, or None if it has none for us, or if the process that reads pages died."""
    if reader.fileno() in select.select([stream.fileno(), reader.fileno()], [], [])[0]:
        return None
    head = _receive(stream, JOB.size)
    size = JOB.unpack(head)[0] if head else 0
    content = _receive(stream, size) if 0 < size <= MAX_JOB else None
    return json.loads(content) if content else None


def end_with(stream: socket.socket) -> None:
    """End this process, and so the one that reads, as soon as the host closes the stream: it wants no answer any more.

    A page that takes long to read would otherwise keep its place in the machine after its job was given up.
    """

    def wait() -> None:
        with suppress(OSError):
            stream.recv(1)  # the host sends nothing after the job
        os._exit(0)

    Thread(target=wait, daemon=True).start()


def perform(job: dict[str, Any], proxy: Proxy, tls: ssl.SSLContext, reader: Reading) -> Result:
    """Do a job, within its time."""
    _make_unique()
    signal.setitimer(signal.ITIMER_REAL, float(job["timeout_s"]) + GRACE_S)  # the signal ends this process
    try:
        if job.get("certificates"):
            tls.load_verify_locations(cadata=job["certificates"])
        with open_client(job["token"], proxy=proxy, tls=tls) as client:
            return KINDS[job["kind"]].run(job, client, reader)
    except WebError as error:
        return error.as_header(), b""
    except Exception as error:  # the host shall learn about our own faults, too
        return WebError("worker", f"{type(error).__name__}: {error}").as_header(), b""


def _make_unique() -> None:
    """Mix new entropy into generators whose state is in the snapshot that many machines start from."""
    random.seed()
    ssl.RAND_add(os.urandom(ENTROPY), ENTROPY)


def _receive(stream: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = stream.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
