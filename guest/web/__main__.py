"""The service of the template websearch-tools: processes that fetch and read pages for the host."""

import argparse
import gc
import ssl
from functools import partial
from pathlib import Path

import certifi

from guest.allocator import keep_freed_memory
from guest.prctl import set_dumpable
from guest.web.client import Proxy
from guest.web.job import Places, serve_job
from guest.web.rehearsal import rehearse
from guest.web.workers import Workers

SOCKET = "/run/mcp-sandbox/proxy.sock"


def main() -> None:
    """Serve jobs until killed."""
    parser = argparse.ArgumentParser(prog="guest.web", description=__doc__)
    parser.add_argument("--socket", default=SOCKET, help="where the tunnel listens for jobs")
    parser.add_argument("--proxy", default="127.0.0.1:3128", metavar="HOST:PORT", help="where it listens for HTTP")
    parser.add_argument("--ready-file", type=Path, help="created when processes wait for jobs")
    options = parser.parse_args()
    host, _, port = options.proxy.rpartition(":")
    set_dumpable(dumpable=False)
    keep_freed_memory()
    tls = ssl.create_default_context(cafile=certifi.where())
    rehearse(tls)
    gc.freeze()  # the collector of a fork shall not write to memory that it shares with this process
    workers = Workers(partial(serve_job, Places(options.socket, Proxy(host, int(port))), tls))
    try:
        workers.start()
        if options.ready_file:
            options.ready_file.touch()
        workers.run()
    finally:
        workers.stop()


if __name__ == "__main__":
    main()
