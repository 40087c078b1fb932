"""Network mode `nat` for the length of a block: a machine's link, and the rules about it."""

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import anyio
import anyio.to_thread

from vmm.errors import LaunchFailed, NetworkUnsupported, VmmError
from vmm.limits import installation
from vmm.network import tables
from vmm.network.plan import OWN_NETWORK, Link, NatConfig, candidates, ruleset
from vmm.process import ANNOUNCED, RunningProcess, find_tool
from vmm.types import NetworkDevice

CAP_NET_ADMIN = 1 << 12
START_S = 20.0  # it takes 20 ms; a busy host needs much longer
REMOVE_S = 10.0  # it takes milliseconds

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Nat:
    """Gives the machines of one driver their links."""

    def __init__(self, config: NatConfig | None, run_dir: Path) -> None:
        self._config = config
        self._installation = installation(run_dir)

    @asynccontextmanager
    async def veth(self, machine_id: str, process: RunningProcess) -> AsyncIterator[NetworkDevice]:
        """Wait until a process announces its network namespace, connect that, and let the process go on.

        Raises NetworkUnsupported or LaunchFailed. The device is configured.
        """
        config = await self._checked()
        from vmm.network import links  # here, because netlink takes 0.3 s to import and few machines need it

        owner, namespace = tables.table_name(self._installation, machine_id), f"/proc/{process.pid}/ns/net"
        async with AsyncExitStack() as stack:
            await _announced(machine_id, process)
            make = partial(links.make_veth, config.uplink, await self._free_links(config), namespace, owner)
            link, index = await _call(make)
            await self._open(stack, link, index, owner, config)
            await process.open_gate()
            yield NetworkDevice(config.resolvers)

    @asynccontextmanager
    async def tap(self, machine_id: str) -> AsyncIterator[tuple[NetworkDevice, int]]:
        """Create a tap; raise NetworkUnsupported. Yield what the machine has to configure, and the tap's descriptor."""
        config = await self._checked()
        from vmm.network import links

        owner = tables.table_name(self._installation, machine_id)
        make = partial(links.make_tap, config.uplink, await self._free_links(config), owner)
        async with AsyncExitStack() as stack:
            link, index, tap = await _call(make)
            stack.callback(os.close, tap)
            await self._open(stack, link, index, owner, config)
            yield NetworkDevice(config.resolvers, link.machine, link.host.ip), tap

    async def _open(self, stack: AsyncExitStack, link: Link, index: int, owner: str, config: NatConfig) -> None:
        """Put the rules into force, then let packets through. The stack removes the link, then the rules."""
        from vmm.network import links

        stack.push_async_callback(_remove, partial(tables.remove, config.uplink, owner))
        stack.push_async_callback(_remove, partial(_call, partial(links.remove_link, config.uplink, index)))
        await tables.load(config.uplink, ruleset(owner, link, config))
        await _call(partial(links.open_link, config.uplink, link))

    async def _free_links(self, config: NatConfig) -> list[Link]:
        from vmm.network import links

        return candidates(await _call(partial(links.routed_networks, config.uplink)), SystemRandom())

    async def _checked(self) -> NatConfig:
        """Return the configuration if this host can do it; raise NetworkUnsupported."""
        if self._config is None:
            raise NetworkUnsupported("network mode nat is not allowed on this host; the operator sets allow_nat = true")
        if (trouble := await _call(partial(nat_trouble, self._config.uplink))) is not None:
            raise NetworkUnsupported(trouble)
        return self._config


def nat_trouble(uplink: str = OWN_NETWORK) -> str | None:
    """Return None if machines can have network mode `nat` on this host, or what is missing and how to get it."""
    if os.geteuid() != 0:
        return "network mode nat needs root: it makes network devices and nftables rules"
    if not _capabilities() & CAP_NET_ADMIN:
        return "network mode nat needs CAP_NET_ADMIN: start the server's container with --cap-add NET_ADMIN"
    if find_tool(tables.NFT) is None:
        return "network mode nat needs nft: apt-get install nftables"
    from vmm.network import links

    if not links.forwards(uplink):
        return "network mode nat needs a host that forwards packets: sysctl -w net.ipv4.ip_forward=1"
    return None


def _capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


async def _announced(machine_id: str, process: RunningProcess) -> None:
    try:
        with anyio.fail_after(START_S):
            await process.stream.receive(len(ANNOUNCED))
    except TimeoutError as error:
        raise LaunchFailed(f"machine {machine_id} did not start in {START_S:.0f} s: {process.tail}") from error
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
        raise LaunchFailed(f"machine {machine_id} did not start: {await process.wait()}") from error


async def _call(work: Callable[[], T]) -> T:
    """Do blocking work in a thread, to its end."""
    try:
        return await anyio.to_thread.run_sync(work)
    except OSError as error:  # netlink's errors are such, too
        raise NetworkUnsupported(f"network mode nat failed on this host: {error}") from error


async def _remove(work: Callable[[], Awaitable[object]]) -> None:
    try:
        with anyio.move_on_after(REMOVE_S, shield=True):
            await work()
    except VmmError as error:  # the next server removes it
        logger.warning("cannot remove what a machine had of the host's network: %s", error)
