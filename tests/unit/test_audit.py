"""The audit log: where it is, and what its lines say."""

import asyncio
import json
import stat
from pathlib import Path

import pytest
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

from mcp_sandbox.accounts import audit
from mcp_sandbox.accounts.audit import FILE, audited, note, open_audit
from mcp_sandbox.errors import SandboxNotFound


def lines_of(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "logs" / FILE).read_text().splitlines()]


def test_a_call_is_a_line_that_only_the_user_can_read(tmp_path: Path):
    with open_audit(tmp_path, "file"), audited("rest", "run"):
        note("sb-1", "run-2")
    (line,) = lines_of(tmp_path)
    kept = {name: line[name] for name in ("owner", "token", "face", "action", "sandbox", "run", "outcome")}
    assert kept == {
        "owner": "local",
        "token": None,
        "face": "rest",
        "action": "run",
        "sandbox": "sb-1",
        "run": "run-2",
        "outcome": "ok",
    }
    assert stat.S_IMODE((tmp_path / "logs" / FILE).stat().st_mode) == 0o600


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SandboxNotFound("sb-1"), "sandbox_not_found"),
        (wrapped(ToolError("words"), SandboxNotFound("sb-1")), "sandbox_not_found"),
        (ToolError("words"), "bad_request"),
        (UnexpectedToolError("words"), "internal_error"),
        (KeyError("secret"), "internal_error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_a_failed_call_has_the_code_of_its_error_and_not_its_words(tmp_path: Path, error: BaseException, outcome: str):
    with open_audit(tmp_path, "file"), pytest.raises(type(error)), audited("mcp", "run_code"):
        raise error
    assert lines_of(tmp_path)[0]["outcome"] == outcome
    assert "words" not in (tmp_path / "logs" / FILE).read_text()


@pytest.mark.parametrize("text", ["print('code')", "x" * 65, "", 7, None, {"a": 1}])
def test_what_is_no_id_is_left_out(tmp_path: Path, text: object):
    with open_audit(tmp_path, "file"), audited("mcp", "run_code") as entry:
        entry.about(text, text)
    line = lines_of(tmp_path)[0]
    assert (line["sandbox"], line["run"]) == (None, None)


def test_old_lines_make_room_and_stay_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "FILE_BYTES", 1000)
    with open_audit(tmp_path, "file"):
        for _ in range(100):
            with audited("mcp", "run_code"):
                pass
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) == audit.OLD_FILES + 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert all(file.stat().st_size <= 1000 for file in files)


def test_the_log_may_go_to_stderr_or_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with open_audit(tmp_path, "stderr"), audited("mcp", "run_code"):
        pass
    assert json.loads(capsys.readouterr().err)["action"] == "run_code"
    with open_audit(tmp_path, "off"), audited("mcp", "run_code"):
        pass
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []
