"""Starts a machine in network mode `nat` in the network namespace of this process, says so, and waits to be killed.

With `recover`, it starts a server's service instead, which removes what killed servers have left.
"""

import sys
from contextlib import AsyncExitStack

import anyio

from mcp_sandbox.app import open_host, open_service
from mcp_sandbox.config import load_settings
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from vmm.types import NetworkMode


async def main() -> None:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(load_settings(driver="bubblewrap", allow_nat=True)))
        if sys.argv[1] == "recover":
            await stack.enter_async_context(open_service(host, pooled=False))
        else:
            built = await host.builder.build(host.settings.catalogue.load(host.settings.template), host.driver)
            identity = new_identity(network=NetworkMode.NAT)
            await stack.enter_async_context(start(host.driver, built, identity, NetworkMode.NAT))
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)  # until the test kills it or closes its end


anyio.run(main)
