"""One sandbox: who owns it, which state it is in, and the task that keeps its machine."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.abc

from guest.errors import AgentGone, AgentTimeout, ProtocolError
from mcp_sandbox import logs
from mcp_sandbox.admission import Ticket
from mcp_sandbox.errors import Closed, Expired, MachineLost, SandboxError, first_of
from mcp_sandbox.lifecycle import OVER, USABLE, End, Lifespan, State, moved
from mcp_sandbox.provider import Lease
from mcp_sandbox.running import LiveRun, RunBook
from vmm.driver import Machine

LOSS_REASON_S = 1.0  # the agent's stream breaks a moment before the machine's process is known to have ended

logger = logging.getLogger(__name__)


class Sandbox:
    """A machine in an owner's hands, from the first request to the last trace of it."""

    def __init__(
        self, sandbox_id: str, template: str, lifespan: Lifespan, ticket: Ticket, runs: RunBook, *, one_off: bool
    ) -> None:
        self.id = sandbox_id
        self.owner = ticket.owner
        self.template = template
        self.lifespan = lifespan
        self.one_off = one_off  # made for one run, and ends with it
        self.state = State.CREATING
        self.created = self.last_used = anyio.current_time()
        self.lease: Lease | None = None
        self.runs = runs
        self.turn = anyio.Lock()  # the right to start a run: one kernel, one run at a time
        self.settled = anyio.Event()  # it is ready, or never will be
        self.ended = anyio.Event()  # nothing of it is left
        self._ticket = ticket
        self._end: End | None = None
        self._reason = ""
        self._failure: SandboxError | None = None
        self._untold_loss: LiveRun | None = None  # a run that cost the variables, and nobody knows yet
        self._over = anyio.Event()
        self._start_scope = anyio.CancelScope()
        self._uses: set[anyio.CancelScope] = set()
        self._tasks: anyio.abc.TaskGroup | None = None  # of what goes on in the machine

    # -- state ---------------------------------------------------------------------------------------------

    def end(self, end: End, reason: str = "") -> None:
        """Nobody may use it any more; its keeper lets go of the machine. Only the first call counts."""
        if self.state in OVER:
            return
        if self.state is State.CREATING:
            self._start_scope.cancel()
        self._move(State.LOST if end is End.LOST else State.CLOSING)
        self._end, self._reason = end, reason
        self._ticket.passing = True
        self._over.set()
        for use in self._uses:
            use.cancel()

    def error(self) -> SandboxError:
        """What to tell somebody who wants to use a sandbox that is over."""
        match self._end:
            case End.FAILED if self._failure is not None:
                return self._failure
            case End.EXPIRED:
                return Expired(self.id, self._reason)
            case End.LOST:
                return MachineLost(self.id, self._reason)
            case _:
                return Closed(self.id)

    @property
    def failed(self) -> bool:
        """It never started, so nobody ever had it."""
        return self._end is End.FAILED

    def keep_on(self) -> None:
        """It was made for one run, and that takes longer: now it is a sandbox like any other."""
        self.one_off = self._ticket.passing = False

    def _move(self, state: State) -> None:
        self.state = moved(self.state, state)

    # -- use -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Lease]:
        """The machine, for as long as the sandbox lives: when it ends, what is done with it is cancelled.

        Raises:
            SandboxError: the sandbox is over, or ended in the middle.
        """
        await self.settled.wait()
        lease = self._usable()
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
                self.last_used = anyio.current_time()
        if scope.cancelled_caught:
            raise self.error()

    def touch(self) -> None:
        """Count as a use what needs no machine.

        Raises:
            SandboxError: the sandbox is over.
        """
        self._usable()
        self.last_used = anyio.current_time()

    def ends_at(self) -> tuple[float, str]:
        """When the sandbox ends if nothing more happens, and why. A sandbox in use is not idle."""
        return self.lifespan.ends_at(self.created, anyio.current_time() if self._uses else self.last_used)

    def expires_in_s(self) -> float:
        """Seconds until it ends if nothing more happens."""
        return max(0.0, self.ends_at()[0] - anyio.current_time())

    def _usable(self) -> Lease:
        if self.state not in USABLE or self.lease is None:
            raise self.error()
        return self.lease

    # -- runs ----------------------------------------------------------------------------------------------

    def start_run(self, run: LiveRun, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done for `run`, in a task that ends before the machine does.

        Raises:
            SandboxError: the sandbox is over.
        """
        self._usable()
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
            if run.background or (run.result is not None and run.result.left_out):
                self.runs.keep(run)
            run.finish()

    def loss_told(self, run: LiveRun) -> None:
        """Somebody has the result of `run`, and with it the news if it cost the variables."""
        if self._untold_loss is run:
            self._untold_loss = None

    def take_loss(self) -> bool:
        """Whether variables were lost and nobody knows; who asks is going to tell."""
        lost, self._untold_loss = self._untold_loss is not None, None
        return lost

    # -- the keeper ----------------------------------------------------------------------------------------

    async def keep(self, source: AbstractAsyncContextManager[Lease]) -> None:
        """Get a machine and hold it until the sandbox is over. Runs in a task of its own and never raises."""
        try:
            with logs.about(self.id), self._start_scope:
                async with source as lease:
                    if self.state is State.CREATING:  # else it came at the very moment nobody wanted it any more
                        self._settle(lease)
                        await self._hold(lease)
        except Exception as error:
            self._fail(error)
        finally:
            self.end(End.CLOSED, "the server stopped")
            if self.state is State.CLOSING:
                self._move(State.CLOSED)
            self.lease = self._tasks = None
            self.settled.set()
            self.ended.set()

    def _settle(self, lease: Lease) -> None:
        self.lease = lease
        self._move(State.READY)
        self.last_used = anyio.current_time()

    async def _hold(self, lease: Lease) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._watch, lease.machine)
            self.settled.set()
            while not self._over.is_set():
                deadline, why = self.ends_at()
                if deadline <= anyio.current_time():
                    self.end(End.EXPIRED, why)
                with anyio.CancelScope(deadline=deadline):
                    await self._over.wait()
            self._tasks.cancel_scope.cancel()

    async def _watch(self, machine: Machine) -> None:
        self.end(End.LOST, f"the machine ended with {await machine.wait()}")

    def _fail(self, error: Exception) -> None:
        first = first_of(error)
        if first is not error or not isinstance(first, SandboxError):
            logger.warning("sandbox %s ended with an error", self.id, exc_info=error, extra={"sandbox": self.id})
        if self.state is State.CREATING:
            if not isinstance(first, SandboxError):
                first = SandboxError(
                    f"The sandbox could not be started ({first}). Try again; `mcp-sandbox doctor` tells more."
                )
            self._failure = first
            self.end(End.FAILED)
        else:
            self.end(End.LOST, str(first))
