"""Calls a handler as AWS Lambda does, `handler(event, context)` with JSON in and out, and measures the call."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH123

import json
import os
import resource
import time
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from guest.places import OUTPUTS
from guest.protocol import encode_json

if TYPE_CHECKING:
    from collections.abc import Coroutine

MAX_RESULT = 16 * 1024  # bytes of JSON in the report; a longer result is written to a file
RESET_PEAK = "5"  # for /proc/self/clear_refs


class Context:
    """What a handler gets besides the event, with the attributes that the caller added."""

    def __init__(self, options: dict[str, Any], began_s: float) -> None:
        self.function_name = options["handler"]
        self.memory_limit_in_mb = options["memory_mb"]
        self.aws_request_id = self.request_id = str(uuid.UUID(bytes=os.urandom(16), version=4))
        self._deadline = began_s + options["timeout_s"]
        vars(self).update(options["context"])

    def get_remaining_time_in_millis(self) -> int:
        """Return the time until the run is stopped."""
        return max(0, int(1000 * (self._deadline - time.monotonic())))


class Usage(NamedTuple):
    """What this process had used at one moment."""

    wall_s: float
    cpu_s: float  # including children that have ended
    resident_bytes: int
    peak_bytes: int  # the highest resident size ever, or since it was reset


class Invocation:
    """One call of a handler, which the code of this run or an earlier one defines."""

    def __init__(self, options: dict[str, Any], run: int) -> None:
        self._options = options
        self._run = run
        self._began_s = time.monotonic()
        self._measured: dict[str, Any] | None = None
        self._result: str | None = None

    def call(self, names: dict[str, Any]) -> None:
        """Call the handler, one of the user's `names`.

        Raises what the handler raises, and TypeError if its result is not JSON.
        """
        options = self._options
        name, event, context = options["handler"], options["event"], Context(options, self._began_s)
        handler = _find(names, name)
        exact = reset_peak()
        before = usage()
        try:
            value = handler(event, context)
            if isinstance(value, Awaitable):
                value = run_coroutine(_wait_for(value))
        finally:
            self._measured = _difference(before, usage(), exact=exact)
        try:
            self._result = json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"the result of {name} is not JSON: {error}. Return None, booleans, finite numbers, strings, "
                "lists, and dictionaries with strings as keys."
            ) from None

    def report(self) -> bytes | None:
        """Return the report on the call for the host; None if the handler was not called."""
        if self._measured is None:
            return None
        data = (self._result or "").encode("utf-8", "replace")
        return encode_json(
            {
                "kind": "handler",
                "result": None if self._result is None else data[:MAX_RESULT].decode("utf-8", "ignore"),
                "result_bytes": len(data),
                "result_file": self._save(data) if len(data) > MAX_RESULT else None,
                **self._measured,
            }
        )

    def _save(self, data: bytes) -> str | None:
        """Write the whole result to a file; returns its path, or None if the disk is full."""
        path = f"{OUTPUTS}/run-{self._run}-result.json"
        try:
            os.makedirs(OUTPUTS, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        except OSError:
            return None
        return path


def _find(names: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - any object of the user's
    if name not in names:
        raise NameError(
            f"there is no function {name!r}. Define it with `def {name}(event, context)`, or pass its name as handler."
        )
    if not callable(names[name]):
        raise TypeError(f"{name!r} is of type {type(names[name]).__name__}, which cannot be called.")
    return names[name]


def usage() -> Usage:
    """Return what this process has used so far."""
    mine, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    sizes: dict[str, int] = {}
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("VmRSS:", "VmHWM:")):
                sizes[line[:5]] = int(line.split()[1]) * 1024
    cpu_s = mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime
    # gVisor has no VmHWM. Linux has both, but only VmHWM can be reset.
    peak = sizes.get("VmHWM", mine.ru_maxrss * 1024)
    return Usage(time.monotonic(), cpu_s, sizes["VmRSS"], peak)


def reset_peak() -> bool:
    """Reset the peak of resident memory; False if the system does not allow it."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write(RESET_PEAK)
        file.flush()
        return True
    return False


def _difference(before: Usage, after: Usage, *, exact: bool) -> dict[str, Any]:
    """Return what a call used, for the report. If an earlier peak was higher, its own lies between two sizes."""
    if exact or after.peak_bytes > before.peak_bytes:
        least = after.peak_bytes
    else:
        least = min(max(before.resident_bytes, after.resident_bytes), after.peak_bytes)
    end = {
        "exit_code": None,
        "signal": None,
        "wall_ms": round(1000 * (after.wall_s - before.wall_s)),
        "cpu_ms": round(1000 * (after.cpu_s - before.cpu_s)),
        "peak_bytes": after.peak_bytes,
    }
    return {"end": end, "least_peak_bytes": least}


async def _wait_for(value: Awaitable[Any]) -> Any:  # noqa: ANN401 - the handler's result
    return await value


def run_coroutine(coroutine: "Coroutine[Any, Any, Any]") -> Any:  # noqa: ANN401 - what the user's code gives
    """Run a coroutine to its end in a new event loop."""
    import asyncio  # most code does not need it

    with asyncio.Runner() as runner:
        return runner.run(coroutine)
