"""A restored machine is the twin of every other one from its snapshot, until it is told who it is."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import Identity, Refreshed, WarmUp
from mcp_sandbox.errors import ClockSkew, NotUnique
from templates.snapshot import WARM_TIMEOUT_S
from vmm.types import Isolation

AGENT_TIMEOUT_S = 40.0  # who asks gives up sooner and may try again: this is for a wire that is dead
MAX_CLOCK_SKEW_S = 1.0  # certificates, caches and logs start to go wrong beyond
CLOCK_TRIES = 3  # after the first one, which is slow: the guest runs its code for the first time
ENTROPY_BYTES = 64  # twice what the kernel's generator holds


def new_identity(hostname: str | None = None) -> Identity:
    """What no other machine is called and has."""
    name = hostname or f"sandbox-{secrets.token_hex(4)}"
    return Identity(hostname=name, machine_id=secrets.token_hex(16), entropy=os.urandom(ENTROPY_BYTES))


def same_again(identity: Identity) -> Identity:
    """For a machine that was away for a while: new entropy, and nothing else that its code could notice."""
    return replace(identity, entropy=os.urandom(ENTROPY_BYTES), reseed=False)


@asynccontextmanager
async def open_unique(
    stream: ByteStream, identity: Identity, isolation: Isolation, warmup: WarmUp | None = None
) -> AsyncIterator[AgentClient]:
    """Greet a clone and give it its own entropy, clock and identity: until then it is the twin of every other clone.

    With `warmup`, a machine that was not warm yet is warmed up so first.

    Raises:
        SandboxError: it is not unique, or its clock cannot be set right.
    """
    async with AgentClient.open(stream, timeout_s=AGENT_TIMEOUT_S, identity=identity) as agent:
        if warmup is not None:
            await agent.warm(warmup, timeout_s=WARM_TIMEOUT_S)
            agent.refreshed = await agent.refresh(identity)  # a warm-up rehearses being unique, under another name
        refreshed = await _on_time(agent, identity)
        if isolation is Isolation.VM and not (refreshed.entropy_credited and refreshed.hostname_set):
            # Only a kernel frozen with the snapshot can be a twin; elsewhere the host's own one gives entropy.
            what = "name" if refreshed.entropy_credited else "entropy"
            raise NotUnique(what)
        if abs(refreshed.clock_skew_s) > MAX_CLOCK_SKEW_S:
            raise ClockSkew(refreshed.clock_skew_s)
        yield agent


async def _on_time(agent: AgentClient, identity: Identity) -> Refreshed:
    """What came of the refresh, once it was quick enough: a clock set by a request that was long on its way is late."""
    refreshed = agent.refreshed
    assert refreshed is not None  # it was opened with an identity
    for _ in range(CLOCK_TRIES):
        if abs(refreshed.clock_skew_s) <= MAX_CLOCK_SKEW_S / 2:
            break
        refreshed = await agent.refresh(identity)
    return refreshed
