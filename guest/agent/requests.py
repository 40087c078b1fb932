"""Answers the host's requests, in one thread with one event loop. Code runs in other processes."""

import gc
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from guest.agent import online
from guest.agent.children import Children
from guest.agent.file_requests import FileRequests
from guest.agent.identity import Identity
from guest.agent.languages import version_of
from guest.agent.listener import Listener
from guest.agent.loop import Link, Loop
from guest.agent.offline import go_offline
from guest.agent.processors import Processors
from guest.agent.service import Service
from guest.agent.shell import find_shell
from guest.agent.supervisor import Supervisor
from guest.agent.tunnel import Tunnel
from guest.agent.user import User
from guest.allocator import return_freed_memory
from guest.errors import RequestRefused
from guest.languages import language as facts
from guest.protocol import PROTOCOL_VERSION, Frame
from guest.seccomp import confine

AGENT_VERSION = "0.1.0"
MAX_MESSAGE = 4000  # characters of a refusal; even with all of them escaped it fits into a header
EXERCISE = {"id": 0, "grace_ms": 1000, "head_bytes": 1024, "tail_bytes": 1024, "max_display_bytes": 1024}
SAMPLE_NAME = "sandbox-00000000"  # as long as the names of clones: keeping a file's length is faster

Done = Callable[[RequestRefused | None], None]  # gets why a machine cannot run code, or None


class Agent:
    """The agent of one machine."""

    def __init__(self, user: User, *, one_kernel: bool = False, processors: Processors | None = None) -> None:
        self._loop = Loop()
        self._user = user
        self._channel = Link(self._loop, None, self._receive, self._host_gone)
        self._on_host_gone: Callable[[], None] = self._loop.stop
        children = Children(self._loop)
        self._service = Service(self._loop, children, user)
        self._kernels = Supervisor(self._loop, self._channel, user, children, self._service, one_kernel=one_kernel)
        self._processors = processors  # None: the machine's kernel knows how many there are
        self._size: tuple[int, int] | None = None  # memory in MB and CPUs, if the host has told them
        self._files = FileRequests(user)
        self._tunnel = Tunnel(self._loop, self._channel)
        self._identity = Identity()
        self._language_version = version_of(self._kernels.language)
        self._confined = False  # the seccomp filter is installed
        self._rehearsal = ""  # code of the template, see `_rehearse`
        self._operations: dict[str, Callable[[dict[str, Any], bytes], None]] = {
            "hello": self._hello,
            "refresh": self._refresh,
            "warm": self._warm,
            "rehearse": self._rehearse,
            "settle": self._settle,
            "run": self._start_run,
            "stop": self._stop,
            "stdin": self._take_input,
            "ping": self._ping,
            "at_rest": self._at_rest,
            "close_streams": self._close_streams,
            "terminal": self._open_terminal,
            **dict.fromkeys(
                ("terminal_input", "terminal_window", "terminal_resize", "terminal_close"), self._change_terminal
            ),
        }

    def serve_pipes(self, fds: tuple[int, int]) -> None:
        """Serve until the host is gone."""
        self._channel.attach(fds)
        self._loop.run()

    def serve_port(self, fd: int) -> None:
        """Serve forever: the host may leave a virtio port and come back."""
        self._on_host_gone = lambda: None
        self._channel.attach((fd, fd))
        self._loop.run()

    def serve_connections(self, listening: socket.socket) -> None:
        """Serve one connection after the other, forever."""
        self._on_host_gone = Listener(self._loop, listening, self._channel).next
        self._loop.run()

    def _host_gone(self) -> None:
        self._on_host_gone()

    def _receive(self, frame: Frame) -> None:
        """Carry out a request. Whatever goes wrong with it is its answer, and never ends the agent."""
        header, body = frame
        if "do" in header:
            self._tunnel.take(header, body)
            return
        request = header.get("id")
        if type(request) is not int:
            return  # no answer to it could be recognised
        try:
            self._dispatch(header, body)
        except RequestRefused as refused:
            self._refuse(request, refused)
        except Exception as error:  # any other bad request: too deep, too large, not a number, …
            self._refuse(request, RequestRefused("bad_request", f"{_shown(header.get('op'))}: {error!r}"))

    def _dispatch(self, header: dict[str, Any], body: bytes) -> None:
        op = header.get("op")
        if op in self._operations:
            self._operations[op](header, body)
        elif op in self._files.operations:
            answer, data = self._files.answer(op, header, body)
            self._answer(header["id"], answer, data)
            if "file" in answer and op == "write":
                self._kernels.artifacts.ignore(answer["file"]["path"])
        else:
            raise RequestRefused("bad_request", f"this agent does not know the request {_shown(op)}")

    def _answer(self, request: object, answer: dict[str, Any], body: bytes = b"") -> None:
        self._channel.send({"id": request, "ok": True, **answer}, body)

    def _refuse(self, request: object, refused: RequestRefused) -> None:
        error = {"code": refused.code, "message": refused.message[:MAX_MESSAGE]}
        self._channel.send({"id": request, "ok": False, "error": error})

    # ------------------------------------------------------------ requests

    def _hello(self, header: dict[str, Any], _body: bytes) -> None:
        answer = {
            "version": PROTOCOL_VERSION,
            "nonce": header["nonce"],
            "agent": AGENT_VERSION,
            "language": self._kernels.language,
            "language_version": self._language_version,
        }
        self._answer(header["id"], answer)

    def _refresh(self, header: dict[str, Any], body: bytes) -> None:
        """Make this machine unique. The kernel's entropy comes first: everything else draws on it."""
        request, hostname, machine_id = header["id"], str(header["hostname"]), str(header["machine_id"])
        answer: dict[str, Any] = {"entropy_credited": self._identity.credit_entropy(body)}

        def done() -> None:
            self._answer(request, {**answer, "time_ns": time.time_ns()})

        self._identity.set_clock(int(header["time_ns"]))
        answer["hostname_set"] = self._identity.set_name(hostname, machine_id)
        self._set_network(str(header["network"]))
        self._identity.set_device(header["device"])
        if header["size"] is not None:
            self._resize(int(header["size"]["memory_mb"]), int(header["size"]["cpus"]))
        if header["reseed"]:
            self._kernels.reseed(done, everything=header.get("reseed_all") is True)
        else:
            done()

    def _resize(self, memory_mb: int, cpus: int) -> None:
        """Let code use and see another size than that of the snapshot. The host has set its own limits already."""
        if self._size == (memory_mb, cpus):
            return  # as after a fork: code keeps what it has set itself
        self._size = memory_mb, cpus
        if self._processors:
            self._processors.show(cpus)
        self._kernels.resize(memory_mb, cpus)

    def _set_network(self, mode: str) -> None:
        if self._identity.set_network(mode):
            self._kernels.change_environment(online.changes(mode))
        if mode == "proxy":
            self._tunnel.listen()
        else:
            self._tunnel.close()

    def _warm(self, header: dict[str, Any], body: bytes) -> None:
        request = header["id"]
        self._confine(user_namespaces=header["user_namespaces"] is True)
        os.environ.update({str(name): str(value) for name, value in header["env"].items()})
        go_offline(os.environ)
        self._kernels.language = str(header["language"])
        self._language_version = version_of(self._kernels.language)
        self._rehearsal = str(header["rehearsal"])

        def warmed(error: str | None) -> None:
            if error is not None:
                self._refuse(request, RequestRefused("bad_request", error))
                return
            self._user.make_places()
            os.sync()  # so that no write-back disturbs the first caller
            cells = [("code", cell) for cell in facts(self._kernels.language).warm_cells]
            self._exercise(cells, self._then(request, rehearse), may_fail=True)

        def rehearse() -> None:
            self._exercise(self._first_runs(), self._then(request, lambda: self._warm_done(request)))

        def served(failure: str | None) -> None:
            if failure is not None:
                self._refuse(request, RequestRefused("bad_request", f"the service does not start: {failure}"))
                return
            self._kernels.warm(body.decode("utf-8"), warmed)

        if header["service"] is None:
            served(None)
        else:
            self._service.start(header["service"], served)

    def _rehearse(self, header: dict[str, Any], _body: bytes) -> None:
        """Run again what ended the warm-up: a restored machine is slow until it has touched its pages.

        The runs leave no trace, except in generators: a refresh has to follow.
        """
        request = header["id"]
        self._exercise(self._first_runs(), self._then(request, lambda: self._answer(request, {})))

    def _settle(self, header: dict[str, Any], _body: bytes) -> None:
        """Wait for what a refresh has started, such as a new interpreter: the machine may stand still after this."""
        request, code = header["id"], facts(self._kernels.language).settling_code
        runs = [("code", code)] if code else []
        self._exercise(runs, self._then(request, lambda: self._answer(request, {})))

    def _first_runs(self) -> list[tuple[str, str]]:
        """Return what stands for the first calls of an owner: code, and a command if the machine has a shell."""
        code = [("code", self._rehearsal)] if self._rehearsal.strip() else []
        return [*code, *([("command", "true")] if find_shell() else [])]

    def _then(self, request: int, go_on: Callable[[], None]) -> Done:
        """Return what refuses a request after a failure, and otherwise goes on."""
        return lambda refused: go_on() if refused is None else self._refuse(request, refused)

    def _exercise(self, runs: list[tuple[str, str]], done: Done, *, may_fail: bool = False) -> None:
        """Run code and commands one after the other, only to have their pages in memory."""
        if not runs:
            done(None)
            return
        [(kind, code), *rest] = runs

        def send(header: dict[str, Any], body: bytes) -> None:
            if "ok" not in header:
                return  # output
            if header["ok"] is not True:
                done(RequestRefused(**header["error"]))
            elif header["status"] != "ok" and not may_fail:
                done(RequestRefused("bad_request", f"the rehearsal failed: {_failure(header, body)}"))
            else:
                self._loop.soon(lambda: self._exercise(rest, done, may_fail=may_fail))

        self._kernels.run({**EXERCISE, "kind": kind}, code.encode(), send, counted=False)

    def _warm_done(self, request: int) -> None:
        """Do what a refresh does, to have its pages in memory, too."""
        self._identity.set_name(SAMPLE_NAME, "0" * 32)
        self._identity.credit_entropy(os.urandom(32))
        gc.collect()
        gc.freeze()
        return_freed_memory()
        self._kernels.count_threads()
        self._kernels.settle()
        self._kernels.reseed(lambda: self._answer(request, {}))

    def _confine(self, *, user_namespaces: bool) -> None:
        """Install the seccomp filter before any code runs, once. Raises OSError: then no code runs at all."""
        if not self._confined:
            confine(user_namespaces=user_namespaces)
            self._confined = True

    def _start_run(self, header: dict[str, Any], body: bytes) -> None:
        request = header["id"]
        self._confine(user_namespaces=False)

        def send(event: dict[str, Any], data: bytes) -> None:
            self._channel.send({"id": request, **event}, data)

        self._kernels.run(header, body, send)

    def _open_terminal(self, header: dict[str, Any], _body: bytes) -> None:
        self._confine(user_namespaces=False)
        self._kernels.open_terminal(header)

    def _change_terminal(self, header: dict[str, Any], body: bytes) -> None:
        self._kernels.terminals.change(header["op"], header, body)
        self._answer(header["id"], {})

    def _stop(self, header: dict[str, Any], _body: bytes) -> None:
        self._kernels.stop(int(header["run"]))
        self._answer(header["id"], {})

    def _take_input(self, header: dict[str, Any], body: bytes) -> None:
        self._kernels.take_input(int(header["run"]), body, end=header["end"] is True)
        self._answer(header["id"], {})

    def _ping(self, header: dict[str, Any], _body: bytes) -> None:
        self._answer(header["id"], {})

    def _at_rest(self, header: dict[str, Any], _body: bytes) -> None:
        """Say whether nothing would notice if the machine stood still."""
        self._answer(header["id"], {"at_rest": self._kernels.at_rest and not self._tunnel.in_use})

    def _close_streams(self, header: dict[str, Any], _body: bytes) -> None:
        """End all streams. The next refresh opens the tunnel again, if the machine still has a network."""
        self._tunnel.close()
        self._answer(header["id"], {})


def _failure(header: dict[str, Any], trace: bytes) -> str:
    """Return how a run failed."""
    message = header["error"]["message"] if "error" in header else header["status"]
    return trace.decode("utf-8", "replace") or str(message)


def _shown(op: object) -> str:
    """Return the name of a request as an error quotes it, whatever it is."""
    return repr(op[:40]) if type(op) is str else type(op).__name__
