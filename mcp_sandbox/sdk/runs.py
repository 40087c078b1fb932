"""A run that goes on in its sandbox while the program does other things."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from mcp_sandbox.sdk.following import follow
from mcp_sandbox.sdk.link import Ask, Link
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.views import OutputPage, SentInput

INPUT_BYTES = 256 << 10  # of one request

Where = Callable[[], tuple[Link, str]]  # the link to the server, and the sandbox's path


class AsyncRun:
    """A run in the background: until its end, its time limit or `stop`, or until its sandbox is closed."""

    def __init__(self, where: Where, run_id: str) -> None:
        self.run_id = run_id
        self._where = where

    def __aiter__(self) -> AsyncGenerator[OutputPage | RunResult, None]:
        """Yield the output as it comes, from its start, then the result. Leaving the loop does not stop the run."""
        link, run = self._path()
        return follow(link, run)

    async def wait(self) -> RunResult:
        """Return its result when it has ended."""
        async with aclosing(aiter(self)) as events:
            async for event in events:
                if isinstance(event, RunResult):
                    return event
        raise AssertionError("events end with a result or an error")

    async def stop(self) -> RunResult:
        """Stop it and return its result."""
        link, run = self._path()
        return await link.ask(Ask("POST", f"{run}/stop"), RunResult)

    async def write_stdin(self, data: bytes | str, *, close: bool = False) -> None:
        """Send input, if it was started with `stdin_open`. It waits a little if the run does not read.

        Raises:
            StdinClosed: the run takes no input, or none any more.
            StdinFull: it does not read; `taken` says how much of the last 256 KiB it has.
        """
        data = data.encode() if isinstance(data, str) else data
        while len(data) > INPUT_BYTES:
            await self._send(data[:INPUT_BYTES], close=False)
            data = data[INPUT_BYTES:]
        await self._send(data, close=close)

    async def close_stdin(self) -> None:
        """Let it find the end of its input."""
        await self._send(b"", close=True)

    async def _send(self, data: bytes, *, close: bool) -> None:
        async def content() -> AsyncIterator[bytes]:
            yield data

        link, run = self._path()
        await link.ask(Ask("POST", f"{run}/stdin", {"close": str(close).lower()}, content=content), SentInput)

    def _path(self) -> tuple[Link, str]:
        link, box = self._where()
        return link, f"{box}/runs/{self.run_id}"
