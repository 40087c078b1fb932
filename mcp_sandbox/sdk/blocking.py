"""A sandbox for ordinary programs and notebooks: the asynchronous one, driven by an event loop in another thread.

So it works where a loop runs already, as in Jupyter. The thread exists as long as a sandbox is open.
"""

import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import anyio
from anyio.from_thread import BlockingPortalProvider

from guest.places import WORKSPACE
from mcp_sandbox.sdk.files import MAX_READ_BYTES, AsyncFiles
from mcp_sandbox.sdk.options import (
    BASE_URL,
    TEMPLATE,
    CodeOptions,
    CommandOptions,
    FetchOptions,
    SandboxOptions,
    SearchOptions,
)
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.sdk.runs import AsyncRun
from mcp_sandbox.sdk.sandbox import AsyncSandbox
from mcp_sandbox.views import ArtifactView, FileView, OutputPage, PageView, SandboxView, SearchView, WrittenFile
from mcp_sandbox.views.sandboxes import Reseed

LOOP = BlockingPortalProvider()

T = TypeVar("T")


class _Job(Generic[T]):
    """Asynchronous work for a thread that may lose interest in it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._abandoned = False
        self._begun: tuple[anyio.CancelScope, anyio.Event] | None = None

    async def carry_out(self) -> T:
        """Do the work."""
        scope, over = self._begun = anyio.CancelScope(), anyio.Event()
        try:
            with scope:
                if not self._abandoned:
                    return await self._work()
            raise CancelledError
        finally:
            over.set()

    async def abandon(self) -> None:
        """Cancel the work and wait until it has cleaned up."""
        self._abandoned = True
        if self._begun is not None:
            scope, over = self._begun
            scope.cancel()
            await over.wait()


def call(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do asynchronous work in the loop's thread and return its result. Ctrl-C cancels it and waits for its end."""
    job = _Job(work)
    with LOOP as portal:
        try:
            return portal.start_task_soon(job.carry_out).result()
        except BaseException:  # Ctrl-C may arrive before there is a future that could be cancelled
            portal.call(job.abandon)
            raise


class Files:
    """The files of one sandbox. Relative paths begin in /workspace."""

    def __init__(self, files: AsyncFiles) -> None:
        self._files = files

    def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return a file's content."""
        return call(lambda: self._files.read(path, max_bytes=max_bytes))

    def read_text(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> str:
        """Return a file's content as text; raises WrongFileKind if it is not UTF-8."""
        return call(lambda: self._files.read_text(path, max_bytes=max_bytes))

    def write(self, path: str, content: bytes | str) -> WrittenFile:
        """Create or replace a file, and its directories."""
        return call(lambda: self._files.write(path, content))

    def upload(self, local: str | os.PathLike[str], path: str | None = None) -> WrittenFile:
        """Copy a local file into the sandbox; without a path, under its name into /workspace."""
        return call(lambda: self._files.upload(local, path))

    def download(self, path: str, local: str | os.PathLike[str] | None = None) -> Path:
        """Copy a file of the sandbox to a local path or into a local directory; default: the working directory."""
        return call(lambda: self._files.download(path, local))

    def list(self, path: str = WORKSPACE, *, recursive: bool = False) -> list[FileView]:
        """Return the entries of a directory."""
        return call(lambda: self._files.list(path, recursive=recursive))


class Run:
    """A run in the background: until its end, its time limit or `stop`, or until its sandbox is closed."""

    def __init__(self, run: AsyncRun) -> None:
        self._run = run
        self.run_id = run.run_id

    def __iter__(self) -> Iterator[OutputPage | RunResult]:
        """Yield the output as it comes, from its start, then the result. Leaving the loop does not stop the run."""
        return _iterated(aiter(self._run))

    def wait(self) -> RunResult:
        """Return its result when it has ended."""
        return call(self._run.wait)

    def stop(self) -> RunResult:
        """Stop it and return its result."""
        return call(self._run.stop)

    def write_stdin(self, data: bytes | str, *, close: bool = False) -> None:
        """Send input, if it was started with `stdin_open`. It waits a little if the run does not read.

        Raises:
            StdinClosed: the run takes no input, or none any more.
            StdinFull: it does not read; `taken` says how much of the last 256 KiB it has.
        """
        call(lambda: self._run.write_stdin(data, close=close))

    def close_stdin(self) -> None:
        """Let it find the end of its input."""
        call(self._run.close_stdin)


class Sandbox:
    """A sandbox on the server at `base_url`, or in this process (`base_url=None`). It ends with its `with`.

    In a notebook, `box = Sandbox().open()` keeps it for several cells: until `box.close()`, until nothing refers to
    it any more, or until Python exits.
    """

    def __init__(
        self,
        template: str = TEMPLATE,
        *,
        base_url: str | None = BASE_URL,
        token: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self._adopt(AsyncSandbox(template, base_url=base_url, token=token, **options))

    def _adopt(self, box: AsyncSandbox) -> Self:
        self._box = box
        self._end: Callable[[], object] = lambda: None
        self.files = Files(box.files)
        return self

    # -- its life ------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Create the sandbox. `with` does it, too, and also closes it.

        Raises:
            NoConnection, TokenRefused, UnknownTemplate, HostNotReady, SandboxError: there is none.
        """
        with LOOP:
            try:
                call(self._box.open)
                return self._hold()
            except BaseException:  # Ctrl-C may arrive when it is open
                call(self._box.close)
                raise

    def _hold(self) -> Self:
        """Keep the loop's thread until the open sandbox is closed."""
        lease = ExitStack()
        lease.enter_context(LOOP)
        self._end = weakref.finalize(self, _end, self._box, lease, call(_thread))
        return self

    def close(self) -> None:
        """End the sandbox and everything in it. Closing it again does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def run_once(
        cls,
        code: str,
        template: str = TEMPLATE,
        base_url: str | None = BASE_URL,
        token: str | None = None,
        **options: Unpack[CodeOptions],
    ) -> RunResult:
        """Run code in a sandbox of its own, which ends afterwards with all of its files."""
        with cls(template, base_url=base_url, token=token) as box:
            return box.run(code, **options)

    @property
    def sandbox_id(self) -> str:
        """The id under which the server knows it."""
        return self._box.sandbox_id

    def info(self) -> SandboxView:
        """Return what it is made from, how it is isolated and how long it lives."""
        return call(self._box.info)

    # -- runs ----------------------------------------------------------------------------------------------

    def run(self, code: str, **options: Unpack[CodeOptions]) -> RunResult:
        """Run code and return its result. Code that fails is a normal result. Ctrl-C stops the run."""
        return call(lambda: self._box.run(code, **options))

    def run_command(self, command: str, **options: Unpack[CommandOptions]) -> RunResult:
        """Run a shell command and return its result."""
        return call(lambda: self._box.run_command(command, **options))

    def stream(self, code: str, **options: Unpack[CodeOptions]) -> Iterator[OutputPage | RunResult]:
        """Run code and yield its output as it comes, then its result. Leaving the loop early stops the run."""
        return _iterated(self._box.stream(code, **options))

    def start(self, code: str, *, stdin_open: bool = False, **options: Unpack[CodeOptions]) -> Run:
        """Run code in the background. With `stdin_open`, it reads what `write_stdin` sends."""
        return Run(call(lambda: self._box.start(code, stdin_open=stdin_open, **options)))

    def start_command(self, command: str, *, stdin_open: bool = False, **options: Unpack[CommandOptions]) -> Run:
        """Run a shell command in the background, such as a server, beside other commands and code."""
        return Run(call(lambda: self._box.start_command(command, stdin_open=stdin_open, **options)))

    # -- copies, pauses, the web, artifacts ----------------------------------------------------------------

    def fork(self, count: int = 1, *, reseed: Reseed = "global") -> "list[Sandbox]":
        """Return copies with all variables, processes and files. Each must be closed, too."""
        copies = call(lambda: self._box.fork(count, reseed=reseed))
        return [Sandbox()._adopt(copy)._hold() for copy in copies]  # noqa: SLF001

    def pause(self) -> SandboxView:
        """Save the sandbox to disk and free its memory. `resume` continues it."""
        return call(self._box.pause)

    def resume(self) -> SandboxView:
        """Continue the paused sandbox."""
        return call(self._box.resume)

    def search(self, query: str, **options: Unpack[SearchOptions]) -> SearchView:
        """Search the web. The results are untrusted text."""
        return call(lambda: self._box.search(query, **options))

    def fetch(self, url: str, *, save: bool = False, **options: Unpack[FetchOptions]) -> PageView:
        """Fetch a page as text, which is untrusted. With `save`, the whole download becomes a file in the sandbox."""
        return call(lambda: self._box.fetch(url, save=save, **options))

    def list_artifacts(self) -> list[ArtifactView]:
        """Return the files in /tmp/outputs."""
        return call(self._box.list_artifacts)

    def read_artifact(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the content of a file in /tmp/outputs."""
        return call(lambda: self._box.read_artifact(path, max_bytes=max_bytes))


def _iterated(events: AsyncGenerator[OutputPage | RunResult, None]) -> Iterator[OutputPage | RunResult]:
    async def next_event() -> OutputPage | RunResult | None:
        return await anext(events, None)

    async def leave() -> None:
        await events.aclose()

    try:
        while (event := call(next_event)) is not None:
            yield event
    finally:
        call(leave)


async def _thread() -> int:
    return threading.get_ident()


def _end(box: AsyncSandbox, lease: ExitStack, loop_thread: int) -> None:
    """Close a sandbox and give up the loop. The garbage collector may call this in the loop's own thread."""
    if threading.get_ident() == loop_thread:
        threading.Thread(target=_end, args=(box, lease, 0)).start()
        return
    with lease:
        call(box.close)
