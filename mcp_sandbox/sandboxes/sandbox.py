"""One sandbox: who owns it, which state it is in, and how it is used. `keeper` has the task that holds its machine."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager

import anyio
import anyio.abc
import anyio.lowlevel

from guest.errors import AgentGone, AgentTimeout, ProtocolError
from mcp_sandbox.errors import SandboxError, SandboxPaused
from mcp_sandbox.machines.provider import Frozen, Lease, LeasedMachine
from mcp_sandbox.runs.running import LiveRun, LostRun, RunBook
from mcp_sandbox.sandboxes.admission import Ticket
from mcp_sandbox.sandboxes.lifecycle import ALIVE, OVER, USABLE, End, Ending, Lifespan, State, moved

LOSS_REASON_S = 1.0  # the agent's stream breaks a moment before the machine's process is known to have ended

logger = logging.getLogger(__name__)


class Attempt:
    """One try to have a machine: when the sandbox is made, and whenever it is resumed."""

    def __init__(self, source: AbstractAsyncContextManager[Lease]) -> None:
        self.source = source
        self.asked_at = anyio.current_time()
        self.scope = anyio.CancelScope()
        self.settled = anyio.Event()  # there is a machine, or none will come of it
        self.ended = anyio.Event()  # nothing is left of it
        self.failure: SandboxError | None = None

    def give_up(self) -> None:
        """Nobody wants the machine any more. One that is there stays."""
        if not self.settled.is_set():
            self.scope.cancel()


class Watcher:
    """Told of what happens to sandboxes. This one does not care."""

    def got_machine(self, box: "Sandbox", machine: LeasedMachine, waited_s: float) -> None:
        """The sandbox has a machine, so long after it wanted one: its first, or another one after a pause."""

    def ran(self, box: "Sandbox", outcome: str) -> None:
        """A run in it is over."""

    def refused(self, limit: str) -> None:
        """Somebody did not get what they asked for, because of this setting."""


class Sandbox:
    """A machine in an owner's hands, from the first request to the last trace of it."""

    def __init__(
        self,
        sandbox_id: str,
        template: str,
        lifespan: Lifespan,
        ticket: Ticket,
        runs: RunBook,
        source: AbstractAsyncContextManager[Lease],
        *,
        one_off: bool,
        watcher: Watcher,
    ) -> None:
        self.id = sandbox_id
        self._watcher = watcher
        self.owner = ticket.owner
        self.ticket = ticket
        self.template = template
        self.lifespan = lifespan
        self.one_off = one_off  # made for one run, and ends with it
        self.state = State.CREATING
        self.created = self.last_used = anyio.current_time()
        self.lease: Lease | None = None
        self.last_lease: Lease | None = None  # while it is paused, what is known of its machine
        self.frozen: Frozen | None = None
        self.runs = runs
        self.turn = anyio.Lock()  # the right to start a run: one kernel, one run at a time
        self.ended = anyio.Event()  # nothing of it is left
        self._attempt = Attempt(source)  # the newest one
        self._wanted: Attempt | None = self._attempt  # what the keeper is to try next
        self.settled = self._attempt.settled  # it is ready, or never will be
        self.ending: Ending | None = None  # once it is over
        self._failure: SandboxError | None = None
        self._untold_loss: LiveRun | None = None  # a run that cost the variables, and nobody knows yet
        self._over = anyio.Event()
        self._changed = anyio.Event()  # the keeper has to look what is wanted of it
        self._uses: set[anyio.CancelScope] = set()
        self._unused = anyio.Event()
        self._entrance = anyio.Lock(fast_acquire=True)  # to be passed by whoever is going to use the machine
        self._tasks: anyio.abc.TaskGroup | None = None  # of what goes on in the machine
        self._freezer = AsyncExitStack()  # holds the frozen state

    # -- state ---------------------------------------------------------------------------------------------

    def end(self, end: End, reason: str = "") -> None:
        """Nobody may use it any more; its keeper lets go of the machine. Only the first call counts."""
        if self.state in OVER:
            return
        self._attempt.give_up()
        self._move(State.LOST if end is End.LOST else State.CLOSING)
        run = self.runs.current if end is End.LOST else None
        self.ending = Ending(
            self.id,
            self.owner,
            end,
            reason,
            one_off=self.one_off,
            unused=run is None or not run.sent,
            lost_run=None if run is None else LostRun(run.id, run.log, run.elapsed_s),
        )
        self.ticket.passing = True
        self._over.set()
        self._changed.set()
        for use in self._uses:
            use.cancel()

    async def close(self, reason: str = "") -> bool:
        """End it and wait until nothing of it is left; False if it was ending already."""
        was_alive = self.state not in OVER
        self.end(End.CLOSED, reason)
        await self.ended.wait()
        return was_alive

    def error(self) -> SandboxError:
        """What to tell somebody who wants to use a sandbox that is paused or over."""
        if self.ending is None:
            return SandboxPaused(self.id)
        return self._failure or self.ending.error()

    def keep_on(self) -> None:
        """It was made for one run, and that takes longer: now it is a sandbox like any other."""
        self.one_off = self.ticket.passing = False

    def _move(self, state: State) -> None:
        self.state = moved(self.state, state)

    # -- use -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Lease]:
        """The machine, for as long as the sandbox lives: when it ends, what is done with it is cancelled.

        Raises:
            SandboxError: the sandbox is paused or over, or ended in the middle.
        """
        await self.settled.wait()
        async with self._entrance:
            pass
        async with self._use() as lease:
            yield lease

    @asynccontextmanager
    async def use_alone(self) -> AsyncIterator[Lease]:
        """Like `use`, when all others have left; whoever comes meanwhile waits. Runs have to be kept out by `turn`."""
        await self.settled.wait()
        async with self._entrance:
            while self._uses:
                self._unused = anyio.Event()
                await self._unused.wait()
            async with self._use() as lease:
                yield lease

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[Lease]:
        lease = self.usable()
        with anyio.CancelScope() as scope:
            self._uses.add(scope)
            try:
                yield lease
            except (AgentGone, AgentTimeout, ProtocolError) as error:
                with anyio.move_on_after(LOSS_REASON_S):
                    await self._over.wait()
                self.end(End.LOST, str(error))
                raise self.error() from error
            finally:
                self._uses.discard(scope)
                if not self._uses:
                    self._unused.set()
                self.last_used = anyio.current_time()
        if scope.cancelled_caught:
            raise self.error()

    def touch(self) -> None:
        """Count as a use what needs no machine.

        Raises:
            SandboxError: the sandbox is over.
        """
        if self.state not in ALIVE:
            raise self.error()
        self.last_used = anyio.current_time()

    def ends_at(self) -> tuple[float, str]:
        """When the sandbox ends if nothing more happens, and why. In use it is not idle, and paused neither."""
        if self.state is State.PAUSED:
            return self.lifespan.too_old_at(self.created)
        return self.lifespan.ends_at(self.created, anyio.current_time() if self._uses else self.last_used)

    def expires_in_s(self) -> float:
        """Seconds until it ends if nothing more happens."""
        return max(0.0, self.ends_at()[0] - anyio.current_time())

    def usable(self) -> Lease:
        """The machine of a sandbox that can be used now.

        Raises:
            SandboxError: the sandbox is paused or over.
        """
        if self.state not in USABLE or self.lease is None:
            raise self.error()
        return self.lease

    # -- runs ----------------------------------------------------------------------------------------------

    def start_run(self, run: LiveRun, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done for `run`, in a task that ends before the machine does.

        Raises:
            SandboxError: the sandbox is over.
        """
        self.usable()
        assert self._tasks is not None, "a sandbox that can be used has its keeper"
        self._move(State.RUNNING)
        self.runs.current = run
        self._tasks.start_soon(self._work, run, work, name=f"{run.id} in {self.id}")

    async def _work(self, run: LiveRun, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            self.runs.current = None
            if self.state is State.RUNNING:
                self._move(State.READY)
            if run.result is not None and run.result.state == "lost":
                self._untold_loss = run
            if run.background or (run.result is not None and run.result.log_needed):
                self.runs.keep(run)
            run.finish()
            with self._watched():
                self._watcher.ran(self, run.outcome)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Whoever only watches does no harm."""
        try:
            yield
        except Exception as error:
            logger.warning("a watcher of sandbox %s failed", self.id, exc_info=error, extra={"sandbox": self.id})

    def loss_told(self, run: LiveRun) -> None:
        """Somebody has the result of `run`, and with it the news if it cost the variables."""
        if self._untold_loss is run:
            self._untold_loss = None

    def take_loss(self) -> bool:
        """Whether variables were lost and nobody knows; who asks is going to tell."""
        lost, self._untold_loss = self._untold_loss is not None, None
        return lost

    # -- pausing -------------------------------------------------------------------------------------------

    async def pause(self, freeze: Callable[[Lease], AbstractAsyncContextManager[Frozen]]) -> None:
        """Freeze the machine and let it go. Who calls this has the turn.

        Cancelled before the state is written, it changes nothing; after that the machine goes in any case.

        Raises:
            SandboxError: it could not be frozen and goes on, or it ended in the middle.
        """
        attempt = self._attempt
        async with self.use_alone() as lease, AsyncExitStack() as stack:
            frozen = await stack.enter_async_context(freeze(lease))
            await anyio.lowlevel.checkpoint_if_cancelled()  # freezing does not stop half-way
            self.usable()
            self.frozen, self.lease, self._freezer = frozen, None, stack.pop_all()
            self._move(State.PAUSED)
            self._changed.set()
        await attempt.ended.wait()

    async def resume(self, source: AbstractAsyncContextManager[Lease]) -> None:
        """Go on with the machine of `source`. Who calls this has the turn.

        Raises:
            SandboxError: there is none, and the sandbox is paused as before or over.
        """
        attempt = self._attempt = self._wanted = Attempt(source)
        self._changed.set()
        try:
            await attempt.settled.wait()
        except BaseException:
            attempt.give_up()
            raise
        if self.state not in USABLE:
            raise attempt.failure or self.error()
