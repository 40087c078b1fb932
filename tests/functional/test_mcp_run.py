"""`mcp-sandbox run` with fake machines: what reaches the files and the terminal of the host."""

import io
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from guest.client.messages import Artifact, CodeError, Display, Event, Output
from guest.client.reports import CompiledReport, ProcessEnd
from mcp_sandbox.commands import run
from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.service import SandboxService
from tests.unit.fakes import FakeAgent, FakeProvider, finished

CODE = "x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    provider = FakeProvider()
    monkeypatch.setattr(run, "open_host", nullcontext)
    monkeypatch.setattr(run, "open_service", lambda settings, *, pooled: SandboxService(provider, settings))
    return provider


def plan_artifacts(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Make the code write these files."""

    async def read_back(self: FakeAgent, path: str, *, offset: int = 0, limit: int) -> object:
        self.files.update(files)
        return await plain_read(self, path, offset=offset, limit=limit)

    plain_read = FakeAgent.read
    monkeypatch.setattr(FakeAgent, "read", read_back)
    artifacts: list[Event] = [Artifact(path, len(data)) for path, data in files.items()]
    provider.plans[CODE] = [*artifacts, finished()]


def saved(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def run_once(save: Path | None = None) -> int:
    return run.run_once(Settings(), run.Source(CODE, None, None), None, save)


def test_artifacts_keep_their_directories(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plan_artifacts(provider, monkeypatch, {"/tmp/outputs/a/t.csv": b"1", "/tmp/outputs/b/t.csv": b"2"})
    assert run_once(tmp_path / "new") == 0
    assert saved(tmp_path / "new") == {"a/t.csv": b"1", "b/t.csv": b"2"}


def test_code_in_a_sandbox_cannot_overwrite_or_hide_files_on_the_host(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "Makefile").write_bytes(b"mine")
    names = ["Makefile", ".bashrc", ".git/config", "../escaped", "../../etc/escaped", "bad\x1b[2Jname", "good"]
    plan_artifacts(provider, monkeypatch, {f"/tmp/outputs/{name}": b"theirs" for name in names} | {"/etc/x": b"theirs"})
    assert run_once(directory) == 0
    assert saved(tmp_path) == {"here/Makefile": b"mine", "here/good": b"theirs"}
    printed = capsys.readouterr().err
    assert printed.count("not saved") == 7
    assert "\x1b" not in printed


CONTROLS = "red \x1b[31mtext\x1b[0m\x1b]0;title\x07\ttab\r\x9b2J\n"
EVENTS: list[Event] = [
    Output("stdout", CONTROLS),
    Output("stderr", CONTROLS),
    Display({"text/plain": CONTROLS}),
    finished("error", error=CodeError("E", "e", CONTROLS)),
]


def test_output_cannot_control_the_terminal(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch):
    provider.plans[CODE] = EVENTS
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert run_once() == 1
    assert out.getvalue() == err.getvalue() == "red text]0;title\ttab2J\n" * 2


def test_output_to_a_pipe_is_not_changed(provider: FakeProvider, capsys: pytest.CaptureFixture[str]):
    provider.plans[CODE] = EVENTS
    run_once()
    assert capsys.readouterr().out == CONTROLS * 2


@pytest.mark.parametrize(
    ("name", "template"),
    [("a.cpp", "cpp-algorithm"), ("dir/a.cc", "cpp-algorithm"), ("a.go", "go-algorithm"), ("a.py", None), ("-", None)],
)
def test_the_suffix_of_the_file_selects_the_template(name: str, template: str | None):
    assert run.template_for(name) == template


def test_stdin_and_template_reach_the_machine(provider: FakeProvider, capsys: pytest.CaptureFixture[str]):
    end = ProcessEnd(0, None, 1, 1, 1)
    provider.plans[CODE] = [CompiledReport("run", "g++", 1, "look at line 3", "", "", end), finished()]
    assert run.run_once(Settings(), run.Source(CODE, "cpp-algorithm", "1 2 3"), None, None) == 0
    assert provider.agent.requests[0].options == {"stdin": "1 2 3"}
    assert capsys.readouterr().err == "compiler:\nlook at line 3\n"
