"""`fetch_url` of a page from a server on this host, against the same download and extraction in one native process."""

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
MAX_LINE_BYTES = 1 << 16
CHARS = 20_000  # of the text that a call returns

# Serves a page of 100 KB: half of it text in paragraphs, half of it navigation and scripts. Prints its port.
SERVER = """
import http.server
WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old roofs and nobody looks up ".split()
TEXT = [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(60)) for i in range(140)]
MENU = "".join(f"<li><a href='/{i}'>entry {i}</a></li>" for i in range(500))
PAGE = ("<html><head><title>Foxes</title><script>" + "var x = 1;" * 1500 + "</script></head><body><nav><ul>" + MENU
    + "</ul></nav><article><h1>Foxes</h1>" + "".join(f"<p>{text}.</p>" for text in TEXT) + "</article></body></html>")
PAGE = PAGE.ljust(100_000).encode()
class Site(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
print(server.server_port, flush=True)
server.serve_forever()
"""

# What a machine's worker does, without the machine. Prints milliseconds as JSON, or null without the libraries.
NATIVE = """
import json, sys, time
try:
    import httpx
    from guest.web.extract import Download, extract
except ImportError:
    print("null", flush=True); sys.exit()
url, warm, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
took = []
for number in range(warm + count):
    began = time.perf_counter()
    with httpx.Client(trust_env=False) as client:
        answer = client.get(f"{url}?native={number}")
    header, body = extract(Download(answer.content, url, "text/html", ""), "markdown", 1 << 24, keep=False)
    took.append(1000 * (time.perf_counter() - began))
print(json.dumps(took[warm:]), flush=True)
"""


async def measure(subject: Subject) -> Findings:
    """Fetch a page again and again, each time anew, in a machine that is warm, and in a native process."""
    count = subject.plan.restores
    async with _site() as port:
        url = f"http://127.0.0.1:{port}/page"
        native = await _natively(url, count)
        async with _web(subject, port) as web:
            began = time.perf_counter()
            await _fetch(web, f"{url}?first")
            first = figure("first fetch: the machine starts", "ms", [1000 * (time.perf_counter() - began)])
            warm = [await _fetch(web, f"{url}?warm={number}") for number in range(WARM + count)][WARM:]
    fetched = figure("fetch_url of a 100 KB page, machine warm", "ms", warm)
    figures: list[Figure] = [first, fetched]
    if native is None:  # the libraries are in the template; only developers have them on the host
        return Findings(figures, [])
    alone = figure("the same in one native process", "ms", native)
    ratio = fetched.p50 / alone.p50
    return Findings([*figures, alone], [Promise("fetch_url over the native process, p50", ratio, TIMES, "times")])


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


async def _natively(url: str, count: int) -> list[float] | None:
    argv = [sys.executable, "-P", "-c", NATIVE, url, str(WARM), str(count)]
    async with spawn(argv, confinement=Confinement(offline=False), stdio=True) as process:
        line = await BufferedByteReceiveStream(process.stream).receive_until(b"\n", MAX_LINE_BYTES)
    found: list[float] | None = json.loads(line)
    return found
