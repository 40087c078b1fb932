"""Make a restored machine differ from all others of its snapshot: entropy, clock, hostname, machine id."""

import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace

from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import Device, Identity, Refreshed, WarmUp
from guest.client.streams import ServeStream
from guest.errors import RequestRefused
from mcp_sandbox.errors import ClockSkew, NotUnique
from mcp_sandbox.machines.provider import Lease
from templates.snapshot import BOOT_TIMEOUT_S, WARM_TIMEOUT_S
from vmm.types import Capabilities, NetworkDevice, NetworkMode

AGENT_TIMEOUT_S = 40.0  # only a dead connection takes this long
REHEARSAL_TIMEOUT_S = 60.0  # an idle host needs half a second for a figure
MAX_CLOCK_SKEW_S = 1.0  # beyond it certificates, caches and logs go wrong
CLOCK_RETRIES = 3  # the first try is slow, because the guest touches its code for the first time
ENTROPY_BYTES = 64  # twice the state of the kernel's generator

logger = logging.getLogger(__name__)


def new_identity(hostname: str | None = None, network: NetworkMode = NetworkMode.NONE) -> Identity:
    """Return an identity that no other machine has."""
    name = hostname or f"sandbox-{secrets.token_hex(4)}"
    return Identity(name, secrets.token_hex(16), os.urandom(ENTROPY_BYTES), network)


def renewed(identity: Identity) -> Identity:
    """Return the identity of a machine that continues: new entropy, and no other change its code could notice."""
    return replace(identity, entropy=os.urandom(ENTROPY_BYTES), reseed=False)


async def go_online(lease: Lease, serve_stream: ServeStream) -> Lease:
    """Let a machine that has waited without a network open streams from now on."""
    identity = replace(renewed(lease.identity), network=NetworkMode.PROXY)
    lease.agent.allow_streams(serve_stream)  # first: the machine may open one at once
    await lease.agent.refresh(identity)
    return replace(lease, identity=identity, network=NetworkMode.PROXY)


async def reseed_all(lease: Lease) -> None:
    """Reseed all random generators that can be found in the code of a machine."""
    await lease.agent.refresh(replace(renewed(lease.identity), reseed=True, reseed_all=True))


def with_device(identity: Identity, device: NetworkDevice | None) -> Identity:
    """Return the identity of a machine that has this network device."""
    if device is None:
        return identity
    address, gateway = (None if value is None else str(value) for value in (device.address, device.gateway))
    return replace(identity, device=Device(tuple(map(str, device.resolvers)), address, gateway))


@asynccontextmanager
async def open_unique(
    stream: ByteStream,
    identity: Identity,
    capabilities: Capabilities,
    warmup: WarmUp | None = None,
    serve_stream: ServeStream | None = None,
    *,
    rehearse: bool = False,
) -> AsyncIterator[AgentClient]:
    """Greet a restored machine and give it its own entropy, clock and identity, after a warm-up if one is given.

    It may open streams if there is a function that serves them. `rehearse` makes the first runs in it faster.

    Raises:
        NotUnique, ClockSkew: the machine must not be used.
    """
    boots = capabilities.boots_kernel and warmup is not None
    timeout_s = BOOT_TIMEOUT_S if boots else AGENT_TIMEOUT_S
    first: Identity | None = identity
    if warmup is not None:
        first = replace(identity, network=NetworkMode.NONE, device=None)  # as before a snapshot
    elif rehearse:
        first = None  # what a rehearsal draws from generators must not outlast the refresh
    async with AgentClient.open(
        stream, timeout_s=timeout_s, identity=first, seeking=capabilities.serial, serve_stream=serve_stream
    ) as agent:
        if warmup is not None:
            await agent.warm(warmup, timeout_s=WARM_TIMEOUT_S)
            agent.timeout_s = AGENT_TIMEOUT_S  # it has booted
        elif rehearse:
            await _may_fail(agent.rehearse(REHEARSAL_TIMEOUT_S))
        if first is not identity:
            agent.refreshed = await agent.refresh(identity)  # the warm-up exercises refresh with another identity
        refreshed = await _set_clock(agent, identity)
        if capabilities.boots_kernel and not (refreshed.entropy_credited and refreshed.hostname_set):
            # Only a guest kernel is part of the snapshot; elsewhere the host's kernel provides entropy and name.
            what = "name" if refreshed.entropy_credited else "entropy"
            raise NotUnique(what)
        if abs(refreshed.clock_skew_s) > MAX_CLOCK_SKEW_S:
            raise ClockSkew(refreshed.clock_skew_s)
        if rehearse:
            await _may_fail(agent.settle(WARM_TIMEOUT_S))  # a new interpreter runs the warm-up code, too
        yield agent


async def _may_fail(preparation: Awaitable[None]) -> None:
    """Let a machine prepare for its first run. If its code fails, the machine is only slower."""
    try:
        await preparation
    except RequestRefused as refused:
        logger.warning("a machine starts without its rehearsal: %s", refused)


async def _set_clock(agent: AgentClient, identity: Identity) -> Refreshed:
    """Repeat the refresh until it was fast enough: a clock set by a delayed request is late by the delay."""
    refreshed = agent.refreshed
    assert refreshed is not None  # it was opened with an identity
    for _ in range(CLOCK_RETRIES):
        if abs(refreshed.clock_skew_s) <= MAX_CLOCK_SKEW_S / 2:
            break
        refreshed = await agent.refresh(identity)
    return refreshed
