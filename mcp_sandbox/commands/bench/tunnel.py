"""How fast bytes go from a machine without a network device to a server on this host, and whether streams share fairly.

They take the whole way: a socket in the machine, its agent, the agent channel, the bridge, a server of its own process.
"""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Any

from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from guest.client import AgentClient
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import Subject, run_code
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from vmm.process import Confinement, spawn
from vmm.types import Accel, NetworkMode
from websearch.access import Access, Caller
from websearch.addresses import IPAddress
from websearch.bridge import Bridge
from websearch.policy import Policy
from websearch.quotas import Ledger, Quotas

MB_PER_S, EMULATED_MB_PER_S = 100, 10  # promised for one stream
STREAMS = 50
FAIR_SHARE = 0.5  # of the mean, for the slowest of all streams
FAIR_S, EMULATED_FAIR_S = 5.0, 15.0  # long enough that a stream which comes last for a while does not count
MEGABYTES, EMULATED_MEGABYTES = 200, 10  # of one transfer: a second or two
ENDLESS = 1 << 50  # bytes
LOOPBACK = "127.0.0.1"
HOST = "bench.test"
MAX_LINE_BYTES = 1000

# Reads from each connection until it ends, and then says so; or sends without end. Prints the two ports.
SERVER = """
import contextlib, json, socket, threading
CHUNK = bytes(1 << 20)
def take(peer):
    with peer, contextlib.suppress(OSError):
        while peer.recv(1 << 20): pass
        peer.sendall(b"done")
def give(peer):
    with peer, contextlib.suppress(OSError):
        peer.recv(1 << 20)
        while True: peer.sendall(CHUNK)
def serve(listening, handle):
    while True: threading.Thread(target=handle, args=(listening.accept()[0],), daemon=True).start()
listening = [socket.create_server(("127.0.0.1", 0), backlog=100) for _ in range(2)]
print(json.dumps([one.getsockname()[1] for one in listening]), flush=True)
for one, handle in zip(listening, (take, give)): threading.Thread(target=serve, args=(one, handle)).start()
"""

# The bridge carries TLS only. It reads the first message, which this is, and nothing after it.
GUEST = """
import json, socket, ssl, threading, time
def client_hello():
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=HOST)
    try: client.do_handshake()
    except ssl.SSLWantReadError: return sent.read()
def connect(port, buffer=None):
    peer = socket.socket()
    if buffer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    peer.connect(("127.0.0.1", 3128))
    peer.sendall(f"CONNECT {HOST}:{port} HTTP/1.1\\r\\nHost: {HOST}:{port}\\r\\n\\r\\n".encode())
    if b" 200 " not in peer.recv(4096): raise OSError("the bridge refuses the connection")
    peer.sendall(client_hello())
    return peer
def upload(size):
    chunk, left = bytes(1 << 18), size
    with connect(TAKES) as peer:
        began = time.perf_counter()
        while left > 0: left -= peer.send(chunk[:left])
        peer.shutdown(socket.SHUT_WR)
        if peer.recv(4) != b"done": raise OSError("the server has not got everything")
        return size / 1e6 / (time.perf_counter() - began)
def download(size):
    buffer, left = bytearray(1 << 18), size
    with connect(GIVES) as peer:
        began = time.perf_counter()
        while left > 0:
            if not (got := peer.recv_into(buffer)): raise OSError("the server has ended")
            left -= got
        return size / 1e6 / (time.perf_counter() - began)
def share(port, count, seconds):
    threading.stack_size(1 << 18)  # the stacks of so many threads are more than the memory of a process may be
    done, ready, until = [0] * count, threading.Barrier(count), [0.0]
    def work(number):
        buffer = bytearray(1 << 16)
        with connect(port, 1 << 16) as peer:  # what waits in a large buffer would count as sent
            move = peer.recv_into if port == GIVES else peer.send
            move(buffer)
            if ready.wait() == 0: until[0] = time.perf_counter() + seconds
            ready.wait()
            while time.perf_counter() < until[0]: done[number] += move(buffer)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return [size / 1e6 / seconds for size in done]
"""


async def measure(subject: Subject) -> Findings:
    """Send and receive over one stream, then over many at once."""
    emulated = subject.facts.accel is Accel.TCG
    size = (EMULATED_MEGABYTES if emulated else MEGABYTES) * 1_000_000
    seconds = EMULATED_FAIR_S if emulated else FAIR_S
    rates: dict[str, list[float]] = {"upload": [], "download": []}
    shares: dict[str, list[float]] = {}
    async with _guest(subject) as agent:
        for number in range(subject.plan.transfers):
            for way, samples in rates.items():
                subject.progress(f"{way} over one stream: {number} of {subject.plan.transfers}")
                samples.append(float(await _ask(agent, f"{way}({size})")))
        for way, port in (("upload", "TAKES"), ("download", "GIVES")):
            subject.progress(f"{STREAMS} {way}s at once")
            shares[way] = await _ask(agent, f"share({port}, {STREAMS}, {seconds})")
    figures = [figure(f"{way} over one stream", "MB/s", samples) for way, samples in rates.items()]
    promised = EMULATED_MB_PER_S if emulated else MB_PER_S
    promises = [Promise(f"{entry.name}, p50", entry.p50, promised, "MB/s", at_least=True) for entry in figures]
    for way, each in shares.items():
        figures.append(figure(f"each of {STREAMS} {way}s at once", "MB/s", each))
        name, slowest = f"slowest of {STREAMS} {way}s over the mean", min(each) * len(each) / sum(each)
        promises.append(Promise(name, slowest, FAIR_SHARE, "times", at_least=True))
    return Findings(figures, promises)


@asynccontextmanager
async def _guest(subject: Subject) -> AsyncIterator[AgentClient]:
    """Start a server, and a machine that may reach it and nothing else."""
    async with _server() as (takes, gives):
        bridge = _bridge((takes, gives))

        async def serve(stream: ByteStream) -> None:
            await bridge.serve(stream, Caller("bench", "bench"))

        identity = new_identity(network=NetworkMode.PROXY)
        async with start(subject.driver, subject.built, identity, NetworkMode.PROXY, serve) as (_, agent):
            await run_code(agent, f"HOST, TAKES, GIVES = {HOST!r}, {takes}, {gives}\n{GUEST}")
            yield agent


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[int, int]]:
    """Yield the port of a server that reads everything, and of one that sends without end."""
    argv = [sys.executable, "-I", "-c", SERVER]
    async with spawn(argv, confinement=Confinement(offline=False), stdio=True) as process:
        line = await BufferedByteReceiveStream(process.stream).receive_until(b"\n", MAX_LINE_BYTES)
        takes, gives = json.loads(line)
        yield takes, gives


def _bridge(ports: Sequence[int]) -> Bridge:
    async def resolve(_host: str) -> list[IPAddress]:
        return [ip_address(LOOPBACK)]

    def ignore(_access: Access) -> None:
        """Do not log benchmarks."""

    policy = Policy(ports=frozenset(ports), networks={"this host": ip_network(LOOPBACK)}, allow=(HOST,))
    limits = {"request_bytes": ENDLESS, "response_bytes": ENDLESS, "bytes_per_day": ENDLESS}
    quotas = Quotas(**limits, connections=2 * STREAMS, requests_per_minute=10 * STREAMS)
    return Bridge(policy, Ledger(quotas), resolver=resolve, on_access=ignore)


async def _ask(agent: AgentClient, expression: str) -> Any:  # noqa: ANN401 - a number or a list of them
    return json.loads(await run_code(agent, expression))
