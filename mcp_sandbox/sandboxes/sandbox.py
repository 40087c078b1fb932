"""One sandbox: its owner, its state, and how it is used. `keeper` has the task that holds its machine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager

import anyio
import anyio.lowlevel

from guest.errors import AgentGone, AgentTimeout, ProtocolError
from mcp_sandbox.errors import SandboxError, SandboxPaused, TerminalClosed
from mcp_sandbox.machines.provider import Frozen, Lease, LeasedMachine
from mcp_sandbox.runs.running import LostRun, RunHandle, RunHistory
from mcp_sandbox.sandboxes.admission import Ticket
from mcp_sandbox.sandboxes.lifecycle import ALIVE, OVER, USABLE, End, Ending, Lifespan, State, moved
from mcp_sandbox.sandboxes.machine_slot import MachineSlot, MachineSource
from mcp_sandbox.sandboxes.networks import Network
from mcp_sandbox.sandboxes.standstill import Standstill
from vmm.types import CpuPriority
from websearch.access import Access

LONG_USE_S = 2.0  # a use that takes longer yields to short ones of other sandboxes
LULL_S = 0.5  # without use, before a machine yields to all others: it prepares for the next call meanwhile
LOSS_REASON_S = 1.0  # the agent's stream breaks a moment before the machine's process is known to have ended

logger = logging.getLogger(__name__)


class Observer:
    """Is notified of what happens to sandboxes. This one ignores it."""

    def machine_ready(self, box: "Sandbox", machine: LeasedMachine, waited_s: float) -> None:
        """The sandbox got a machine, its first one or another after a pause, `waited_s` after it wanted one."""

    def run_ended(self, box: "Sandbox", outcome: str) -> None:
        """A run in the sandbox ended."""

    def limit_refused(self, setting: str) -> None:
        """A request was refused because of the limit `setting`."""

    def network_accessed(self, access: Access) -> None:
        """A sandbox's request to the network has ended, or was refused."""


class Sandbox:
    """A machine and its state, owned by one owner, from the request for it until nothing of it is left."""

    def __init__(
        self,
        sandbox_id: str,
        template: str,
        lifespan: Lifespan,
        ticket: Ticket,
        runs: RunHistory,
        source: MachineSource,
        network: Network,
        *,
        one_off: bool,
        observer: Observer,
        standstill_s: float,
    ) -> None:
        self.id = sandbox_id
        self.owner = ticket.owner
        self.ticket = ticket
        self.template = template
        self.lifespan = lifespan
        self.network = network
        self.one_off = one_off  # created for one run, and ends with it
        self.state = State.CREATING
        self.created = self.last_used = anyio.current_time()
        self.slot = MachineSlot(source)
        self.runs = runs
        self.kernel_lock = anyio.Lock()  # held by a call that waits for its code: the next one waits
        self.start_lock = anyio.Lock(fast_acquire=True)  # held to start a run, and to fork, pause or resume
        self.ended = anyio.Event()  # nothing of it is left
        self.ending: Ending | None = None  # once it is over
        self._observer = observer
        self._start_error: SandboxError | None = None
        self._unreported_loss: RunHandle | None = None  # a run that lost the variables, if no result has said so
        self._over = anyio.Event()
        self._uses: set[anyio.CancelScope] = set()
        self._terminals: set[anyio.CancelScope] = set()  # uses that an exclusive one ends
        self._unused = anyio.Event()
        self._next_priority: asyncio.TimerHandle | None = None  # sets the machine's CPU priority later
        self._standstill = Standstill(standstill_s)
        self._entrance = anyio.Lock(fast_acquire=True)  # passed by every use, held by an exclusive one

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def settled(self) -> anyio.Event:
        """Set once the sandbox is ready, or never will be."""
        return self.slot.first_settled

    @property
    def lease(self) -> Lease | None:
        """The machine, if it has one now."""
        return self.slot.lease

    @property
    def last_lease(self) -> Lease | None:
        """The machine, or the one it had before it was paused."""
        return self.slot.last_lease

    @property
    def frozen(self) -> Frozen | None:
        """The saved state of a paused sandbox."""
        return self.slot.frozen

    def end(self, end: End, reason: str = "") -> None:
        """Cancel all uses and have the keeper let go of the machine. Only the first call counts."""
        if self.state in OVER:
            return
        self._move(State.LOST if end is End.LOST else State.CLOSING)
        runs = list(self.runs.active.values()) if end is End.LOST else []
        self.ending = Ending(
            self.id,
            self.owner,
            end,
            reason,
            one_off=self.one_off,
            unused=not any(run.sent for run in runs),
            lost_runs=tuple(LostRun(run.id, run.log, run.elapsed_s) for run in runs),
        )
        self.ticket.short_lived = True
        self._over.set()
        self.slot.give_up()
        for use in self._uses:
            use.cancel()

    async def close(self, reason: str = "") -> bool:
        """End it and wait until nothing of it is left; False if it was ending already."""
        was_alive = self.state not in OVER
        self.end(End.CLOSED, reason)
        await self.ended.wait()
        return was_alive

    def error(self) -> SandboxError:
        """Return the error for a caller who wants to use a sandbox that is paused or over."""
        if self.ending is None:
            return SandboxPaused(self.id)
        return self._start_error or self.ending.error()

    def outlive_run(self) -> None:
        """Turn a sandbox created for one run into an ordinary one: the run goes on in the background."""
        self.one_off = self.ticket.short_lived = False

    def _move(self, state: State) -> None:
        self.state = moved(self.state, state)

    # -- what the keeper reports ---------------------------------------------------------------------------

    def machine_ready(self, machine: LeasedMachine, waited_s: float) -> None:
        """Let the sandbox be used: its machine is here, `waited_s` after it was wanted."""
        with self._observed():
            self._observer.machine_ready(self, machine, waited_s)
        machine.prioritize(CpuPriority.UNUSED)
        self._standstill.expect(self._attempt_standstill)
        self._move(State.READY)
        self.last_used = anyio.current_time()

    def start_failed(self, error: SandboxError) -> None:
        """End a sandbox that never got a machine."""
        self._start_error = error
        self.end(End.FAILED)

    def torn_down(self) -> None:
        """Announce that nothing of the sandbox is left."""
        self._standstill.cancel()
        if self.state is State.CLOSING:
            self._move(State.CLOSED)
        self.ended.set()

    # -- use -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Lease]:
        """Use the machine. The block is cancelled when the sandbox ends.

        Raises:
            SandboxError: the sandbox is paused or over, or ended during the block.
        """
        if not self.settled.is_set():  # to wait for nothing takes a turn of the event loop
            await self.settled.wait()
        async with self._entrance:
            pass
        async with self._use() as lease:
            yield lease

    @asynccontextmanager
    async def use_alone(self) -> AsyncIterator[Lease]:
        """Like `use`, once all other uses are over; new ones wait. The caller keeps runs out with `start_lock`.

        Terminals are closed, because nothing else would end them.
        """
        await self.settled.wait()
        async with self._entrance:
            for terminal in self._terminals:
                terminal.cancel()
            while self._uses:
                self._unused = anyio.Event()
                await self._unused.wait()
            async with self._use() as lease:
                yield lease

    @asynccontextmanager
    async def use_for_terminal(self) -> AsyncIterator[Lease]:
        """Like `use`, until the sandbox is forked or paused. Raises TerminalClosed then."""
        async with self.use() as lease:
            with anyio.CancelScope() as scope:
                self._terminals.add(scope)
                try:
                    yield lease
                finally:
                    self._terminals.discard(scope)
            if scope.cancelled_caught:
                raise TerminalClosed(self.id)

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[Lease]:
        lease = self.usable()
        with anyio.CancelScope() as scope:
            self._begin_use(lease.machine)
            self._uses.add(scope)
            try:
                await self._standstill.end(lease.machine)
                yield lease
            except (AgentGone, AgentTimeout, ProtocolError) as error:
                with anyio.move_on_after(LOSS_REASON_S):
                    await self._over.wait()
                self.end(End.LOST, str(error))
                raise self.error() from error
            finally:
                self._uses.discard(scope)
                if not self._uses:
                    self._end_use(lease.machine)
                    self._unused.set()
                self.last_used = anyio.current_time()
        if scope.cancelled_caught:
            raise self.error()

    def _begin_use(self, machine: LeasedMachine) -> None:
        """Give the machine CPU for a short use, also beside a long one."""
        self._standstill.cancel()
        machine.prioritize(CpuPriority.INTERACTIVE)
        self._prioritize_later(LONG_USE_S, machine, CpuPriority.BATCH)

    def _end_use(self, machine: LeasedMachine) -> None:
        """Leave little CPU to what the sandbox's code has left running."""
        self._prioritize_later(LULL_S, machine, CpuPriority.UNUSED)
        self._standstill.expect(self._attempt_standstill)

    def _prioritize_later(self, after_s: float, machine: LeasedMachine, priority: CpuPriority) -> None:
        if self._next_priority is not None:
            self._next_priority.cancel()
        later = asyncio.get_running_loop().call_later
        self._next_priority = later(after_s, machine.prioritize, priority)

    def _attempt_standstill(self) -> None:
        if self._is_unused():
            self.slot.start_task(self._stand_still, name=f"standstill of {self.id}")

    async def _stand_still(self) -> None:
        async with self._entrance:  # a use that begins meanwhile waits: it takes milliseconds
            if self._is_unused() and not await self._standstill.begin(self.usable()):
                self._standstill.expect(self._attempt_standstill)

    def _is_unused(self) -> bool:
        return self.state is State.READY and not self._uses

    def touch(self) -> None:
        """Restart the idle timeout after a use that needs no machine.

        Raises:
            SandboxError: the sandbox is over.
        """
        if self.state not in ALIVE:
            raise self.error()
        self.last_used = anyio.current_time()

    def ends_at(self) -> tuple[float, str]:
        """Return when the sandbox ends if nothing more happens, and why. It is not idle while used or paused."""
        if self.state is State.PAUSED:
            return self.lifespan.too_old_at(self.created)
        return self.lifespan.ends_at(self.created, anyio.current_time() if self._uses else self.last_used)

    def expires_in_s(self) -> float:
        """Return the seconds until it ends if nothing more happens."""
        return max(0.0, self.ends_at()[0] - anyio.current_time())

    def usable(self) -> Lease:
        """Return the machine.

        Raises:
            SandboxError: the sandbox is paused or over.
        """
        if self.state not in USABLE or self.lease is None:
            raise self.error()
        return self.lease

    # -- runs ----------------------------------------------------------------------------------------------

    def start_run(self, run: RunHandle, work: Callable[[], Awaitable[None]]) -> None:
        """Execute `run` by doing `work`, in a task that ends before the machine does.

        Raises:
            SandboxError: the sandbox is paused or over.
        """

        async def execute() -> None:
            try:
                await work()
            finally:
                self._end_run(run)

        self.usable()
        if self.state is not State.RUNNING:
            self._move(State.RUNNING)
        self.runs.active[run.id] = run
        self.slot.start_task(execute, name=f"{run.id} in {self.id}")

    def _end_run(self, run: RunHandle) -> None:
        del self.runs.active[run.id]
        if self.state is State.RUNNING and not self.runs.active:
            self._move(State.READY)
        if run.result is not None and run.result.state == "lost":
            self._unreported_loss = run
        if run.background or (run.result is not None and run.result.log_needed):
            self.runs.keep(run)
        run.finish()
        with self._observed():
            self._observer.run_ended(self, run.outcome)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Log errors of the observer: they must not harm the sandbox."""
        try:
            yield
        except Exception as error:
            logger.warning("an observer of sandbox %s failed", self.id, exc_info=error, extra={"sandbox": self.id})

    def loss_reported(self, run: RunHandle) -> None:
        """Note that a client has the result of `run`, which says whether it lost the variables."""
        if self._unreported_loss is run:
            self._unreported_loss = None

    def take_unreported_loss(self) -> bool:
        """Return whether variables were lost and no result said so yet. The caller's result will."""
        lost, self._unreported_loss = self._unreported_loss is not None, None
        return lost

    # -- pausing -------------------------------------------------------------------------------------------

    async def pause(self, freeze: Callable[[Lease], AbstractAsyncContextManager[Frozen]]) -> None:
        """Freeze the machine and let it go. The caller holds `start_lock`.

        Cancelled before the state is saved, it changes nothing; after that, the sandbox is paused in any case.

        Raises:
            SandboxError: it could not be frozen and goes on, or it ended meanwhile.
        """
        async with self.use_alone() as lease, AsyncExitStack() as stack:
            frozen = await stack.enter_async_context(freeze(lease))
            await anyio.lowlevel.checkpoint_if_cancelled()  # freezing itself cannot be cancelled halfway
            self.usable()
            machine_ended = self.slot.swap_out(frozen, stack.pop_all())
            self._move(State.PAUSED)
        await machine_ended.wait()

    async def resume(self, source: MachineSource) -> None:
        """Continue with the machine that `source` thaws. The caller holds `start_lock`.

        Raises:
            SandboxError: there is no machine; the sandbox is still paused, or over.
        """
        failure = await self.slot.swap_in(source)
        if self.state not in USABLE:
            raise failure or self.error()
