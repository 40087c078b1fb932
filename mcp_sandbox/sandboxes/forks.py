"""Forking, pausing and resuming sandboxes: freezing and thawing their machines within the limits."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from guest.client.streams import ServeStream
from mcp_sandbox.config import LimitSettings
from mcp_sandbox.errors import BadRequest, PausedLimit
from mcp_sandbox.machines.mapping import map_errors
from mcp_sandbox.machines.provider import Frozen, Lease, Provider
from mcp_sandbox.machines.unique import reseed_all
from mcp_sandbox.sandboxes.admission import Ticket
from mcp_sandbox.sandboxes.roster import Roster, all_or_none, all_ready
from mcp_sandbox.sandboxes.run_calls import between_runs, check_no_run
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views.sandboxes import Reseed

MAX_COPIES = 8  # of one fork


class Forks:
    """Freezes and thaws the machines of sandboxes. Copies join the roster."""

    def __init__(self, provider: Provider, roster: Roster, limits: LimitSettings) -> None:
        self._provider = provider
        self._roster = roster
        self._limits = limits
        self._paused: Counter[str] = Counter()  # frozen states of each owner

    async def fork(self, box: Sandbox, count: int, reseed: Reseed) -> list[Sandbox]:
        """Return `count` copies of `box`, all of them ready; if one fails, there is none."""
        if not 1 <= count <= MAX_COPIES:
            raise BadRequest(f"count must be at least 1 and at most {MAX_COPIES}.")
        box.usable()
        check_no_run(box)  # a more useful error than one about limits
        copies: list[Sandbox] = []
        with all_or_none(copies):
            async with AsyncExitStack() as stack:
                quota = self._roster.current_quota()
                tickets = [Ticket(box.owner, box.ticket.memory_mb, quota=quota) for _ in range(count)]
                places = await stack.enter_async_context(self._roster.admission.places(*tickets))
                async with between_runs(box), box.use_alone() as lease:
                    frozen = await stack.enter_async_context(self._provider.freeze(lease))
                box.network.closed_connections = frozen.closed_streams
                for ticket, place in zip(tickets, places, strict=True):
                    copies.append(self._add_copy(box, ticket, place, frozen, reseed))
                await all_ready(copies)
            await all_ready(copies)  # a copy may have ended while the frozen state was removed
        return copies

    async def pause(self, box: Sandbox) -> None:
        """Freeze `box`, unless it is frozen already."""
        async with between_runs(box):
            if box.frozen is None:
                await box.pause(partial(self._freeze, box))

    async def resume(self, box: Sandbox) -> None:
        """Thaw `box`, if it is frozen."""
        if box.frozen is not None:
            async with between_runs(box):
                if box.frozen is not None:  # else another call has resumed it meanwhile
                    source = self._provider.thaw(box.frozen, copy=False, serve_stream=box.network.serve_stream)
                    await box.resume(self._roster.admitted(box.ticket, source))
        box.touch()

    def _add_copy(self, box: Sandbox, ticket: Ticket, place: AsyncExitStack, frozen: Frozen, reseed: Reseed) -> Sandbox:
        network = self._roster.new_network(box.owner, box.network.grant)
        network.closed_connections = frozen.closed_streams
        source = self._copy(place, frozen, network.serve_stream, reseed)
        return self._roster.add(box.template, box.lifespan, ticket, source, network)

    @asynccontextmanager
    async def _copy(
        self, place: AsyncExitStack, frozen: Frozen, serve: ServeStream | None, reseed: Reseed
    ) -> AsyncIterator[Lease]:
        async with place.pop_all(), self._provider.thaw(frozen, copy=True, serve_stream=serve) as lease:
            if reseed == "all":
                with map_errors():
                    await reseed_all(lease)
            yield lease

    @asynccontextmanager
    async def _freeze(self, box: Sandbox, lease: Lease) -> AsyncIterator[Frozen]:
        """Freeze a machine within the limits on paused sandboxes: they use no memory, but disk."""
        owner = box.owner
        for setting, limit, used in (
            ("limits.owner_paused", self._limits.owner_paused, self._paused[owner]),
            ("limits.paused", self._limits.paused, self._paused.total()),
        ):
            if limit is not None and used >= limit:
                self._roster.admission.on_refusal(setting)
                raise PausedLimit(setting, limit)
        self._paused[owner] += 1
        try:
            async with self._provider.freeze(lease) as frozen:
                box.network.closed_connections = frozen.closed_streams
                yield frozen
        finally:
            self._paused[owner] -= 1
            if not self._paused[owner]:
                del self._paused[owner]
