"""`fetch_url` of a page from a server on this host, against the same download and extraction in one native process."""

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.web import WebMachines
from mcp_sandbox.web.fetching import FetchRequest
from mcp_sandbox.web.opening import open_web
from mcp_sandbox.web.web import Web
from vmm.process import Confinement, spawn
from websearch.policy import Surroundings

OWNER = "bench"
TIMES = 2.0  # promised: as long as the native process takes
WARM = 3  # fetches before the first that counts
PAUSE_S = 1.0  # between two calls: a model reads a page before it asks for the next one
MAX_LINE_BYTES = 1 << 16
CHARS = 20_000  # of the text that a call returns

# Serves pages of 100 KB, each different: half of it text in paragraphs, half of it menu and scripts. Prints its port.
SERVER = """
import http.server, zlib
WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old roofs and nobody looks up ".split()
MENU = "".join(f"<li><a href='/{i}'>entry {i}</a></li>" for i in range(500))
START = ("<html><head><title>Foxes</title><script>" + "var x = 1;" * 1500 + "</script></head><body><nav><ul>" + MENU
    + "</ul></nav><article><h1>Foxes</h1>")
def page(path):
    seed = zlib.crc32(path.encode())
    text = [" ".join(WORDS[(seed + i * 7 + j * (1 + seed % 5)) % len(WORDS)] for j in range(60)) for i in range(140)]
    return (START + "".join(f"<p>{one}.</p>" for one in text) + "</article></body></html>").ljust(100_000).encode()
class Site(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = page(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
print(server.server_port, flush=True)
server.serve_forever()
"""

# What a machine's worker does, without the machine: reads addresses, prints milliseconds. Says first whether it can.
NATIVE = """
import sys, time
try:
    import httpx
    from guest.web.extract import Download, extract
except ImportError:
    print("no", flush=True); sys.exit()
print("yes", flush=True)
for line in sys.stdin:
    url, began = line.strip(), time.perf_counter()
    with httpx.Client(trust_env=False) as client:
        answer = client.get(url)
    extract(Download(answer.content, url, "text/html", ""), "markdown", 1 << 24, keep=False)
    print(1000 * (time.perf_counter() - began), flush=True)
"""


async def measure(subject: Subject) -> Findings:
    """Fetch pages in a machine that is warm, and in a native process, by turns, so that a busy host slows both."""
    count = subject.plan.restores
    alone: list[float] = []
    async with _site() as port, _native() as native, _web(subject, port) as web:
        urls = (f"http://127.0.0.1:{port}/page/{number}" for number in range(1_000_000))
        first = await _fetch(web, next(urls))
        paused: list[float] = []
        for number in range(WARM + count):
            subject.progress(f"pages with a pause: {number} of {WARM + count}")
            if native is not None:
                alone.append(await native(next(urls)))
            paused.append(await _fetch(web, next(urls)))
            await anyio.sleep(PAUSE_S)
        subject.progress("pages without a pause")
        at_once = [await _fetch(web, next(urls)) for _ in range(WARM + count)]
    fetched = figure(f"fetch_url of a 100 KB page, {PAUSE_S:g} s after the last", "ms", paused[WARM:])
    figures: list[Figure] = [
        figure("first fetch: the machine starts", "ms", [first]),
        fetched,
        figure("fetch_url of a 100 KB page, one right after the other", "ms", at_once[WARM:]),
    ]
    if not alone:  # the libraries are in the template; only developers have them on the host
        return Findings(figures, [])
    compared = figure("the same in one native process", "ms", alone[WARM:])
    ratio = fetched.p50 / compared.p50
    promise = Promise("fetch_url over the native process, p50, with pauses", ratio, TIMES, "times")
    return Findings([*figures, compared], [promise])


async def _fetch(web: Web, url: str) -> float:
    began = time.perf_counter()
    await web.fetch(OWNER, FetchRequest(url=url, max_chars=CHARS))
    return 1000 * (time.perf_counter() - began)


@asynccontextmanager
async def _web(subject: Subject, port: int) -> AsyncIterator[Web]:
    """Open the web tools with a machine of their own, which may reach that port of this host."""
    allowed = {"ports": (port,), "private_networks": {"here": "127.0.0.0/8"}, "cache_s": 0}
    settings = type(subject.settings.web).model_validate({**subject.settings.web.model_dump(), **allowed})
    builds = Builds(subject.driver, subject.builder, subject.settings.catalogue)
    provider = LocalProvider(subject.driver, builds, max_restores=1, run_dir=subject.settings.run_dir)
    async with provider, open_web(settings, WebMachines(provider), Surroundings) as web:
        yield web


@asynccontextmanager
async def _site() -> AsyncIterator[int]:
    argv = [sys.executable, "-I", "-c", SERVER]
    async with spawn(argv, confinement=Confinement(offline=False), stdio=True) as process:
        yield int(await BufferedByteReceiveStream(process.stream).receive_until(b"\n", MAX_LINE_BYTES))


@asynccontextmanager
async def _native() -> AsyncIterator[Callable[[str], Awaitable[float]] | None]:
    """Yield what measures one page in a native process, or None if this host does not have the libraries."""
    argv = [sys.executable, "-P", "-c", NATIVE]
    async with spawn(argv, confinement=Confinement(offline=False), stdio=True) as process:
        lines = BufferedByteReceiveStream(process.stream)

        async def native(url: str) -> float:
            await process.stream.send(f"{url}\n".encode())
            return float(await lines.receive_until(b"\n", MAX_LINE_BYTES))

        usable = await lines.receive_until(b"\n", MAX_LINE_BYTES) == b"yes"
        yield native if usable else None
