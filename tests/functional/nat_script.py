"""Starts a machine in network mode `nat` in the network namespace of this process, says so, and waits to be killed.

With `recover`, it starts a server's service instead, which removes what killed servers have left. With the directory of
a template, it asks that service for a sandbox with a network, and says what a site answers to it.
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.config import load_settings
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from mcp_sandbox.runs.requests import CodeRun
from tests.nat_world import PORT, RESOLVER
from vmm.types import NetworkMode

ASK = f"import socket; print(socket.create_connection(('some.example', {PORT}), 60).recv(100).decode(), end='')"


def settings() -> dict[str, Any]:
    folder = Path(sys.argv[1])
    templates = {"template_path": (folder.parent,)} if folder.is_dir() else {}
    return {"driver": "bubblewrap", "allow_nat": True, "network": {"resolvers": [RESOLVER]}, **templates}


async def main() -> None:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(load_settings(**settings())))
        if sys.argv[1] == "recover":
            await stack.enter_async_context(open_service(host, pooled=False))
        elif sys.argv[1] != "machine":
            folder = Path(sys.argv[1])
            await host.builder.build(host.settings.catalogue.load(folder.name), host.driver)
            service = await stack.enter_async_context(open_service(host, pooled=False))
            box = await service.create("me", folder.name, network=NetworkMode.NAT)
            result = await service.run(CodeRun("me", ASK, box.sandbox_id))
            print(box.network, result.stdout.head or result.error, flush=True)
        else:
            built = await host.builder.build(host.settings.catalogue.load(host.settings.template), host.driver)
            identity = new_identity(network=NetworkMode.NAT)
            await stack.enter_async_context(start(host.driver, built, identity, NetworkMode.NAT))
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)  # until the test kills it or closes its end


anyio.run(main)
