"""Interactive terminals: shells on pseudo-terminals, beside the kernel and commands."""

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from guest.agent.children import Children
from guest.agent.command import NOT_RUN
from guest.agent.loop import BOTH, Link, Loop
from guest.agent.shell import find_shell
from guest.agent.sweep import broadcast_to
from guest.agent.user import User
from guest.errors import RequestRefused
from guest.places import WORKSPACE
from guest.prctl import become_subreaper
from guest.processes import end_all, process_table, reset_signals, signal_all, signal_name, tree_of
from guest.terminals import CHUNK, INPUT_WINDOW, MAX_SIDE, MAX_TERM, MAX_TERMINALS, OUTPUT_WINDOW

HANG_UP_S = 0.5  # between SIGHUP and SIGKILL
END_S = 1.0  # for killed processes to be reaped
TURN_READS = 16  # before other descriptors have a turn


class Terminal:
    """One shell and its pseudo-terminal. `closed` is called after its last frame."""

    def __init__(
        self, loop: Loop, channel: Link, user: User, children: Children, request: int, closed: Callable[[int], None]
    ) -> None:
        self.pid = 0
        self._loop, self._channel = loop, channel
        self._user, self._children = user, children
        self._request = request
        self._closed = closed
        self._master = -1
        self._input = bytearray()
        self._credit = OUTPUT_WINDOW
        self._status: int | None = None  # of the shell, once it has ended
        self._settled = False  # and nothing of its session runs
        self._doomed: set[int] = set()  # processes that a hang-up ends, whatever session they open

    def open(self, size: bytes, start: Callable[[int], NoReturn]) -> None:
        """Start a shell. `start` becomes the shell with a terminal, in a child. Raises OSError."""
        with self._user.acting():  # so that the terminal belongs to the user
            self._master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
            self.pid = os.fork()
            if self.pid == 0:
                start(slave)
        except OSError:
            os.close(self._master)
            raise
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)
        self._children.watch(self.pid, self._ended)
        self._loop.add(self._master, lambda _events: self._ready(), BOTH)
        self._send("window", bytes=INPUT_WINDOW)

    # ------------------------------------------------------------ from the host

    def take_input(self, data: bytes) -> None:
        """Type. Raises RequestRefused if the host does not keep to the window."""
        if self._master < 0 or self._status is not None:
            return
        if len(self._input) + len(data) > INPUT_WINDOW:
            raise RequestRefused("too_large", "more input than the terminal's window")
        self._input += data
        self._write()

    def open_window(self, size: int) -> None:
        """Send as many more bytes."""
        self._credit = min(OUTPUT_WINDOW, self._credit + size)
        self.read()

    def resize(self, size: bytes) -> None:
        """Change the size. The kernel sends SIGWINCH to the program in the foreground."""
        if self._master >= 0:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def hang_up(self) -> None:
        """End the shell and everything that it has started."""
        self._close_master()
        if self._status is None:
            self._doomed = self._members()
            self._signal(signal.SIGHUP)
            self._loop.later(HANG_UP_S, self._kill)
        elif self._settled:
            self._finish()

    # ------------------------------------------------------------ from the terminal

    def read(self) -> None:
        """Send output, as far as the host takes it; finish when nothing more can come."""
        for _ in range(TURN_READS):
            if self._master < 0 or not self._credit or self._channel.full:
                return
            try:
                data = os.read(self._master, min(CHUNK, self._credit))
            except BlockingIOError:
                data = b""
            except OSError:  # no process has the terminal open
                data = b""
            if not data:
                if self._settled:
                    self._finish()
                return
            self._credit -= len(data)
            self._send("output", data)
        self._loop.soon(self.read)

    def _ready(self) -> None:
        self._write()
        self.read()

    def _write(self) -> None:
        done = 0
        with suppress(BlockingIOError), memoryview(self._input) as view:
            while done < len(view):
                done += os.write(self._master, view[done:])
        if done:
            del self._input[:done]
            self._send("window", bytes=done)

    def _ended(self, status: int) -> None:
        """End what the shell has left in its session. Processes in sessions of their own outlive it."""
        self._status = status
        if self._members():
            self._signal(signal.SIGHUP)
            self._loop.later(HANG_UP_S, self._kill)
        else:
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        if self._master < 0:
            self._finish()
        else:
            self.read()

    def _kill(self) -> None:
        if not self._settled:
            end_all(self._members, self._children.reap, END_S, broadcast_to(self._user), few=True)
            if self._status is not None:
                self._settle()  # otherwise the end of the shell is about to be reported

    def _members(self) -> set[int]:
        """Return the processes of the terminal: its session, and as long as the shell lives all its descendants."""
        table = process_table()
        roots = self._doomed | ({self.pid} if self._status is None else set())
        session = {pid for pid, process in table.items() if process.session == self.pid}
        found = session | (tree_of(roots, table) & table.keys())
        return {pid for pid in found if not table[pid].zombie}

    def _signal(self, number: int) -> None:
        members = self._members()
        signal_all(members, number)
        signal_all(members, signal.SIGCONT)  # a stopped process takes no other signal

    def _finish(self) -> None:
        """Answer the request that opened the terminal, once."""
        self._close_master()
        assert self._status is not None
        killed = os.WIFSIGNALED(self._status)
        answer = {
            "exit_code": None if killed else os.waitstatus_to_exitcode(self._status),
            "signal": signal_name(os.WTERMSIG(self._status)) if killed else None,
        }
        self._channel.send({"id": self._request, "ok": True, **answer})
        self._closed(self._request)

    def _close_master(self) -> None:
        if self._master >= 0:
            self._loop.remove(self._master)
            os.close(self._master)
            self._master = -1
            self._input.clear()

    def _send(self, event: str, body: bytes = b"", **fields: int) -> None:
        self._channel.send({"id": self._request, "event": event, **fields}, body)


class Terminals:
    """All terminals of the machine."""

    def __init__(self, loop: Loop, channel: Link, user: User, children: Children) -> None:
        self._loop, self._channel = loop, channel
        self._user, self._children = user, children
        self._open: dict[int, Terminal] = {}
        channel.on_drained.append(self._resume)

    @property
    def pids(self) -> set[int]:
        """The shells."""
        return {terminal.pid for terminal in self._open.values()}

    def open(self, header: dict[str, Any]) -> None:
        """Open a terminal; it answers the request itself. Raises RequestRefused, KeyError or TypeError."""
        if len(self._open) >= MAX_TERMINALS:
            raise RequestRefused("busy", f"{MAX_TERMINALS} terminals are open in this sandbox already")
        request, size, term = header["id"], _size(header), header["term"]
        if type(term) is not str or not term.isascii() or not term.isprintable() or len(term) > MAX_TERM:
            raise RequestRefused("bad_request", "term is not the name of a terminal")
        shell = find_shell()
        if shell is None:
            raise RequestRefused("bad_request", "there is no shell in this sandbox's template")

        def start(slave: int) -> NoReturn:
            self._become(shell, slave, term)

        terminal = Terminal(self._loop, self._channel, self._user, self._children, request, self._open.__delitem__)
        try:
            terminal.open(size, start)
        except OSError as error:
            raise RequestRefused("no_kernel", f"no terminal can be opened: {error.strerror}") from error
        self._open[request] = terminal

    def change(self, op: str, header: dict[str, Any], body: bytes) -> None:
        """Carry out a request about a terminal. One that has ended meanwhile ignores it."""
        terminal = self._open.get(header["terminal"])
        if terminal is None:
            return
        if op == "terminal_input":
            terminal.take_input(body)
        elif op == "terminal_window":
            terminal.open_window(int(header["bytes"]))
        elif op == "terminal_resize":
            terminal.resize(_size(header))
        else:
            terminal.hang_up()

    def _become(self, shell: str, slave: int, term: str) -> NoReturn:
        """Turn this child of the agent into a shell with a controlling terminal."""
        try:
            self._user.drop_privileges()  # and open a session
            become_subreaper()  # so that all processes of the terminal stay below it
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(slave, fd)
            os.chdir(WORKSPACE)
            reset_signals()
            os.execve(shell, [shell], {**os.environ, "TERM": term, "SHELL": shell})  # noqa: S606
        except OSError as error:
            os.write(slave, f"mcp-sandbox: the shell could not be started: {error}\r\n".encode())
        finally:
            os._exit(NOT_RUN)

    def _resume(self) -> None:
        for terminal in list(self._open.values()):
            terminal.read()


def _size(header: dict[str, Any]) -> bytes:
    """Return the kernel's struct winsize."""
    sides = header["rows"], header["columns"]
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in sides):
        raise RequestRefused("bad_request", f"rows and columns are numbers from 1 to {MAX_SIDE}")
    return struct.pack("HHHH", *sides, 0, 0)
