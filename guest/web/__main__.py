"""The service of the template websearch-tools: processes that fetch and read pages for the host."""

import argparse
import ssl
from functools import partial
from pathlib import Path

import certifi

from guest.prctl import set_dumpable
from guest.web.client import Proxy
from guest.web.extract import Download, extract
from guest.web.job import Places, serve_job
from guest.web.workers import Workers

SOCKET = "/run/mcp-sandbox/proxy.sock"
WARM_PAGE = b"""<html><head><title>Warm</title><meta name="date" content="2024-01-01"></head><body><nav>x</nav>
<article><h1>Warm</h1><p>The first page <b>loads</b> what <a href="/">later</a> pages need.</p>
<ul><li>one</li></ul><table><tr><th>a</th></tr><tr><td>1</td></tr></table></article></body></html>"""


def warm_up() -> None:
    """Read a small page of each kind once: libraries load and compile much on first use."""
    for form in ("markdown", "text", "html"):
        extract(Download(WARM_PAGE, "http://warm.example/", "text/html"), form, len(WARM_PAGE), keep=False)
    extract(Download(b'{"a": 1}', "http://warm.example/", "application/json"), "text", 100, keep=False)
    extract(Download(b"a,b\n1,2\n", "http://warm.example/", "text/csv"), "text", 100, keep=False)


def main() -> None:
    """Serve jobs until killed."""
    parser = argparse.ArgumentParser(prog="guest.web", description=__doc__)
    parser.add_argument("--socket", default=SOCKET, help="where the tunnel listens for jobs")
    parser.add_argument("--proxy", default="127.0.0.1:3128", metavar="HOST:PORT", help="where it listens for HTTP")
    parser.add_argument("--ready-file", type=Path, help="created when processes wait for jobs")
    options = parser.parse_args()
    host, _, port = options.proxy.rpartition(":")
    set_dumpable(dumpable=False)
    warm_up()
    tls = ssl.create_default_context(cafile=certifi.where())
    workers = Workers(partial(serve_job, Places(options.socket, Proxy(host, int(port))), tls))
    try:
        workers.fill_up()
        if options.ready_file:
            options.ready_file.touch()
        workers.run()
    finally:
        workers.stop()


if __name__ == "__main__":
    main()
