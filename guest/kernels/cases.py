"""Test cases: runs a program with each input and compares its output with what is expected."""

import re
from itertools import zip_longest
from typing import Any

from guest.kernels.runner import Ended, Runner
from guest.protocol import encode_json

KEPT_BYTES = 16 * 1024  # of each stream of a case without expected output
SLACK_BYTES = 64 * 1024  # beyond the expected output: white space that does not count
DEFAULT_TIMEOUT_S = 10.0
MAX_DIFFERENCES = 3  # lines shown; the first one says most
MAX_LINE_CHARS = 160
TOO_LONG = "the output is much longer than expected"
CASES_ROOM = 320 * 1024  # bytes of a report for all cases together, as JSON
CASE_ROOM = 12 * 1024  # bytes for one case
OUT_OF_MEMORY = (
    b"std::bad_alloc",
    b"runtime: out of memory",
    b"cannot allocate memory",
    b"allocation-size-too-big",
    b"java.lang.OutOfMemoryError",
)
# How the findings of sanitizers and of Go's race detector begin. UBSan's program goes on and may end with success.
FINDING = re.compile(
    rb"^(?:\S+:\d+:\d+: runtime error: |=*\d*=*(?:ERROR|WARNING): (?:Address|Leak|Memory|Thread)Sanitizer: |"
    rb"WARNING: DATA RACE).*",
    re.MULTILINE,
)


def run_cases(
    runner: Runner, command: list[str], cases: list[dict[str, Any]], timeout_s: float, memory_bytes: int | None
) -> list[dict[str, Any]]:
    """Run the program once for each case. Cases after an interrupt are not run."""
    room = min(CASE_ROOM, CASES_ROOM // max(1, len(cases)))
    return [_run_case(runner, command, case, timeout_s, memory_bytes, room) for case in cases]


def _run_case(
    runner: Runner, command: list[str], case: dict[str, Any], timeout_s: float, memory_bytes: int | None, room: int
) -> dict[str, Any]:
    if runner.interrupted:
        return {"verdict": "not run", "end": None, "stdout": "", "stderr": "", "diff": ""}
    expected: str | None = case.get("expected")
    keep = KEPT_BYTES if expected is None else len(expected.encode("utf-8", "replace")) + SLACK_BYTES
    stdin = case.get("stdin", "").encode("utf-8", "replace")
    ended = runner.run(command, stdin=stdin, keep=keep, wall_s=timeout_s, memory_bytes=memory_bytes)
    written = ended.stdout.decode("utf-8", "replace")
    diff = "" if expected is None else difference(expected, written)
    if expected is not None and ended.cut:
        diff = diff or TOO_LONG
    return {
        "verdict": verdict(ended, memory_bytes, expected, diff),
        "end": ended.measured(),
        "stdout": cut(written, room // 3),
        "stderr": cut(ended.stderr.decode("utf-8", "replace"), room // 3),
        "diff": cut(diff, room // 3),
    }


def verdict(ended: Ended, memory_bytes: int | None, expected: str | None, diff: str) -> str:
    """Return the outcome of one case."""
    if ended.cause == "interrupted":
        return "not run"
    if ended.cause == "time":
        return "time limit exceeded"
    if ran_out_of_memory(ended, memory_bytes):
        return "memory limit exceeded"
    if finding(ended):
        return "sanitizer finding"
    if ended.exit_code != 0:
        return "runtime error"
    if expected is None:
        return "ran"
    return "wrong output" if diff else "passed"


def ran_out_of_memory(ended: Ended, memory_bytes: int | None) -> bool:
    """Return whether a program exceeded its memory limit, failed to allocate memory, or was killed by the system."""
    if ended.cause == "memory" or ended.oom_killed or (memory_bytes is not None and ended.peak_bytes > memory_bytes):
        return True
    if ended.exit_code == 0 or ended.cause:
        return False
    return any(words in ended.stderr for words in OUT_OF_MEMORY)


def finding(ended: Ended) -> str:
    """Return the first finding of a sanitizer; empty if there is none."""
    found = FINDING.search(ended.stderr)
    return found[0].decode("utf-8", "replace").strip() if found else ""


def difference(expected: str, written: str) -> str:
    """Describe where two texts differ, ignoring white space at the ends of lines and of the text."""
    wanted, got = _lines(expected), _lines(written)
    lines: list[str] = []
    for number, (want, have) in enumerate(zip_longest(wanted, got), 1):
        if want == have:
            continue
        if len(lines) == MAX_DIFFERENCES:
            lines.append("…")
            break
        if have is None:
            lines.append(f"line {number}: expected {_shown(want)}, but the output ends before it")
        elif want is None:
            lines.append(f"line {number}: {_shown(have)} comes after the end of the expected output")
        else:
            lines.append(f"line {number}: expected {_shown(want)}, got {_shown(have)}")
    return "\n".join(lines)


def cut(text: str, room: int) -> str:
    """Return as much of the beginning of a text as takes `room` bytes of JSON."""
    text = text[:room]
    while (size := len(encode_json(text))) > room:
        text = text[: min(len(text) - 1, len(text) * room // size)]
    return text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _shown(line: str) -> str:
    """Return a line in quotes, without its middle if it is long."""
    if len(line) > MAX_LINE_CHARS:
        half = MAX_LINE_CHARS // 2
        line = f"{line[:half]} … {line[-half:]}"
    return f'"{line}"'
