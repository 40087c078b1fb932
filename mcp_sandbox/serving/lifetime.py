"""How the process ends: on a signal, with its parent, or at the end of its input, and always soon.

Left alone, the MCP SDK dies of SIGTERM without cleaning up and hangs after SIGINT, and it does not notice a parent
killed with SIGKILL. Machines would be left behind, so every way to end becomes one cancellation here.
"""

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import anyio

from guest.errors import first_error

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_RESORT_S = 4.5  # we promise that nothing is left after 5 s; machines die with this process
EXIT_HUNG = 70  # EX_SOFTWARE
EXIT_STOPPED = 130  # the shell's exit code for an interrupted command

logger = logging.getLogger(__name__)


class LastResort:
    """Ends the process by force if an orderly shutdown takes too long."""

    def __init__(self, after_s: float = LAST_RESORT_S) -> None:
        self._timer = threading.Timer(after_s, self._fire)
        self._timer.daemon = True
        self._armed = False

    def arm(self) -> None:
        """Start the countdown, once."""
        if not self._armed:
            self._armed = True
            self._timer.start()

    def disarm(self) -> None:
        """Stop the countdown: the orderly shutdown worked."""
        self._timer.cancel()

    def _fire(self) -> None:
        logger.error("the orderly shutdown took too long; exiting at once")
        os._exit(EXIT_HUNG)


def run_command(main: Callable[[], Awaitable[int]]) -> int:
    """Run a command to its exit code. Signals cancel it, so that it cleans up."""
    status = EXIT_STOPPED

    async def body() -> None:
        nonlocal status
        status = await main()

    anyio.run(run_until_stopped, body)
    return status


class Drain(NamedTuple):
    """How `main` is asked to end by itself, and how long that may take. A second signal ends it at once."""

    ask: Callable[[], Awaitable[None]]
    limit_s: float


async def run_until_stopped(
    main: Callable[[], Awaitable[None]],
    *events: Callable[[], Awaitable[str]],
    drain: Drain | None = None,
    reload: Callable[[], None] | None = None,
) -> str | None:
    """Run `main` until it returns, a signal arrives or one of `events` happens; return which event it was.

    With `reload`, SIGHUP calls it instead, unless there is a terminal: then SIGHUP means that it was closed.
    """
    reasons: list[str] = []
    if has_terminal():
        reload = None
    last_resort = LastResort(LAST_RESORT_S + (drain.limit_s if drain else 0))

    async def stop_when(event: Callable[[], Awaitable[str]]) -> None:
        reason = await event()
        logger.info("stopping: %s", reason)
        reasons.append(reason)
        last_resort.arm()
        if drain is not None and len(reasons) == 1:
            tasks.start_soon(stop_when, lambda: _next_signal(signals, reload))
            await drain.ask()
        else:
            tasks.cancel_scope.cancel()

    try:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:
                for event in (lambda: _next_signal(signals, reload), *events):
                    tasks.start_soon(stop_when, event)
                await main()
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        last_resort.disarm()
    return reasons[0] if reasons else None


async def _next_signal(signals: AsyncIterator[signal.Signals], reload: Callable[[], None] | None) -> str:
    async for received in signals:
        if received is not signal.SIGHUP or reload is None:
            return received.name
        reload()
    raise AssertionError("signals never end")


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def parent_gone(parent: int) -> str:
    """Return when our parent process `parent` has ended."""
    # PR_SET_PDEATHSIG fires when the *thread* that started us ends, and in many clients that is a short-lived one.
    reason = f"parent process {parent} ended"
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        return reason
    except OSError as error:
        logger.warning("cannot watch the parent process (%s); only the end of stdin will stop this server", error)
        await anyio.sleep_forever()
    try:
        if os.getppid() == parent:
            await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    return reason
