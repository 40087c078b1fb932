"""What a zygote says is checked: code that it imported may have written it."""

from typing import Any

import pytest

from guest.agent.execution import Execution
from guest.agent.kernel_source import KernelSource, Ordered
from guest.agent.user import User

HEADER = {"id": 1, "grace_ms": 1000, "head_bytes": 8000, "tail_bytes": 0, "max_display_bytes": 0}


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**22, True, "7", 7.0])
def test_only_the_number_of_a_process_is_taken_for_a_kernel(pid: Any):
    source = KernelSource(None, User(None, None), None, one_kernel=True)  # type: ignore[arg-type]
    source._ordered = Ordered(lambda _pid: pytest.fail("started"), lambda _status: None)
    with pytest.raises(ValueError, match="not a kernel"):
        source._handle({"event": "started", "pid": pid})
    assert source._ordered is not None


class Left:
    """A run that left processes running."""

    def end(self, *, below: int = 0) -> int:
        return 2 + below

    def release(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "told"), [("code", True), ("command", True), ("invoke", False)])
def test_only_runs_that_can_keep_processes_are_told_how(monkeypatch, kind: str, told: bool):
    run = Execution({**HEADER, "kind": kind}, b"", 1, User(None, None), lambda *_args: None)
    said: list[bytes] = []
    monkeypatch.setattr(run, "feed", lambda _stream, data: said.append(data))
    run.end_processes(Left())  # type: ignore[arg-type]
    assert b"were ended: 2." in said[0]
    assert (b"keep_processes" in said[0]) is told
