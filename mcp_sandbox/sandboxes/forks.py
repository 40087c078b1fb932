"""Copies of a sandbox, and sandboxes put aside: what is frozen, what is thawed, and who has a place for it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

import anyio.lowlevel

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest, PausedLimit
from mcp_sandbox.machines.provider import Frozen, Lease, Provider
from mcp_sandbox.sandboxes.admission import Admission, Ticket
from mcp_sandbox.sandboxes.lifecycle import OVER, End, Lifespan
from mcp_sandbox.sandboxes.run_calls import between_runs, check_free
from mcp_sandbox.sandboxes.sandbox import Sandbox

MAX_COPIES = 8  # of one fork

Source = AbstractAsyncContextManager[Lease]


class Forks:
    """Freezes and thaws the machines of sandboxes."""

    def __init__(self, provider: Provider, admission: Admission, settings: Settings) -> None:
        self._provider = provider
        self._admission = admission
        self._settings = settings
        self._pauses: Counter[str] = Counter()  # frozen states of each owner

    async def fork(
        self, box: Sandbox, count: int, open_: Callable[[str, Lifespan, Ticket, Source], Sandbox]
    ) -> list[Sandbox]:
        """Copies of `box`, all ready, or none."""
        if not 1 <= count <= MAX_COPIES:
            raise BadRequest(f"count must be at least 1 and at most {MAX_COPIES}.")
        check_free(box)  # before anything is said about places
        copies: list[Sandbox] = []
        with all_or_none(copies):
            async with AsyncExitStack() as stack:
                tickets = [Ticket(box.owner, box.ticket.memory_mb) for _ in range(count)]
                places = await stack.enter_async_context(self._admission.places(*tickets))
                async with between_runs(box), box.use_alone() as lease:
                    frozen = await stack.enter_async_context(self._provider.freeze(lease))
                for ticket, place in zip(tickets, places, strict=True):
                    copies.append(open_(box.template, box.lifespan, ticket, self._copy(place, frozen)))
                await all_ready(copies)
            await all_ready(copies)  # removing the state took a while
        return copies

    async def pause(self, box: Sandbox) -> None:
        """Freeze `box`, if it is not frozen already."""
        async with between_runs(box):
            if box.frozen is None:
                await box.pause(partial(self._paused, box.owner))

    async def resume(self, box: Sandbox, placed: Callable[[Ticket, Source], Source]) -> None:
        """Let `box` go on, if it is frozen."""
        if box.frozen is not None:
            async with between_runs(box):
                if box.frozen is not None:  # nobody else was quicker
                    await box.resume(placed(box.ticket, self._provider.thaw(box.frozen, copy=False)))
        box.touch()

    @asynccontextmanager
    async def _copy(self, place: AsyncExitStack, frozen: Frozen) -> AsyncIterator[Lease]:
        async with place.pop_all(), self._provider.thaw(frozen, copy=True) as lease:
            yield lease

    @asynccontextmanager
    async def _paused(self, owner: str, lease: Lease) -> AsyncIterator[Frozen]:
        """A frozen state that is counted: it takes no memory, but the disk is not endless."""
        for setting, limit, used in (
            ("limits.owner_paused", self._settings.limits.owner_paused, self._pauses[owner]),
            ("limits.paused", self._settings.limits.paused, self._pauses.total()),
        ):
            if limit is not None and used >= limit:
                self._admission.on_refusal(setting)
                raise PausedLimit(setting, limit)
        self._pauses[owner] += 1
        try:
            async with self._provider.freeze(lease) as frozen:
                yield frozen
        finally:
            self._pauses[owner] -= 1
            if not self._pauses[owner]:
                del self._pauses[owner]


@contextmanager
def all_or_none(boxes: list[Sandbox]) -> Iterator[None]:
    """End all of them if the block fails or is cancelled: the caller would never know their ids."""
    try:
        yield
    except BaseException:
        for box in boxes:
            box.end(End.CLOSED, "it was not made in the end")
        raise


async def all_ready(boxes: list[Sandbox]) -> None:
    """Wait until all of them can be used, and somebody still wants them.

    Raises:
        SandboxError: one of them cannot be used; nothing is left of any.
    """
    for box in boxes:
        await box.settled.wait()
    await anyio.lowlevel.checkpoint_if_cancelled()  # both may have happened in the same moment
    failed = next((box for box in boxes if box.state in OVER), None)
    if failed is None:
        return
    for box in boxes:
        box.end(End.CLOSED, "another copy failed")
    for box in boxes:
        await box.ended.wait()
    raise failed.error()
