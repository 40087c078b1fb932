"""`initialize` is answered before anything is imported, if the last server said the same in the same circumstances."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mcp_sandbox.serving import early
from mcp_sandbox.serving.early import EarlyGreeting
from mcp_sandbox.serving.initialize import VERSIONS, answer_to

PARAMS = {"protocolVersion": VERSIONS[-1], "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": PARAMS}
LINE = json.dumps(INITIALIZE).encode() + b"\n"
NEXT = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n'


class Wire(NamedTuple):
    """The pipes of a server, and their other ends."""

    server_in: int
    client_out: int
    client_in: int
    server_out: int

    def unread(self) -> bytes:
        """What the server has sent."""
        os.close(self.server_out)
        return os.read(self.client_in, 1 << 16)


@pytest.fixture
def wire() -> Iterator[Wire]:
    ends = Wire(*os.pipe(), *os.pipe())
    yield ends
    for fd in (ends.server_in, ends.client_out, ends.client_in):
        os.close(fd)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home, and no configuration."""
    for name in ("home", "project", "config", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "home"


def kept(home: Path) -> list[Path]:
    """The files in which servers kept what they said."""
    return list((home / "cache").glob(early.FILES))


def started() -> EarlyGreeting:
    """What a server that starts now knows."""
    return EarlyGreeting(early._circumstances())


def test_the_second_server_answers_as_the_first_one(wire: Wire):
    started().keep("how to use it", "1.0")
    os.write(wire.client_out, LINE + NEXT)
    second = started()
    second.answer(wire.server_in, wire.server_out)
    assert (second.received, second.answered, second.told) == (LINE + NEXT, 1, "how to use it")
    assert wire.unread().decode() == answer_to(INITIALIZE, "how to use it", "1.0")


def set_variable(_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SANDBOX_DRIVER", "qemu")


def add_project_file(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "project" / "mcp-sandbox.toml").write_text("[runs]\ntimeout_s = 3\n")


def add_user_file(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "config" / "mcp-sandbox").mkdir()
    (root / "config" / "mcp-sandbox" / "mcp-sandbox.toml").write_text("allow_nat = true\n")


def install_program(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "bin" / "firecracker").touch()


def download_program(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "home" / "program").mkdir()


def damage(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    kept(root / "home")[0].write_text("{")


def let_others_write(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    kept(root / "home")[0].chmod(0o666)


@pytest.mark.parametrize(
    "change",
    [set_variable, add_project_file, add_user_file, install_program, download_program, damage, let_others_write],
)
def test_a_server_in_other_circumstances_leaves_its_client_alone(
    change: Callable[[Path, pytest.MonkeyPatch], None], wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started().keep("how to use it", "1.0")
    change(tmp_path, monkeypatch)
    os.write(wire.client_out, LINE)
    server = started()
    server.answer(wire.server_in, wire.server_out)
    assert (server.received, server.answered) == (b"", None)
    assert wire.unread() == b""


@pytest.mark.parametrize("sent", [b"", LINE[:-1], NEXT, LINE.replace(b"initialize", b"ping")])
def test_anything_but_an_ordinary_initialize_is_left_to_the_server(sent: bytes, wire: Wire):
    started().keep("how to use it", "1.0")
    os.write(wire.client_out, sent)
    server = started()
    server.answer(wire.server_in, wire.server_out)
    assert (server.received, server.answered) == (sent, None)
    assert wire.unread() == b""


def test_an_answer_that_a_pipe_may_not_take_at_once_is_left_to_the_server(wire: Wire):
    started().keep("x" * early.PIPE_WRITE_BYTES, "1.0")
    os.write(wire.client_out, LINE)
    server = started()
    server.answer(wire.server_in, wire.server_out)
    assert (server.received, server.answered) == (LINE, None)


def test_what_was_wrong_is_forgotten(home: Path):
    started().keep("how to use it", "1.0")
    assert len(kept(home)) == 1
    started().forget()
    assert kept(home) == []


def test_servers_with_other_variables_do_not_forget_each_other(home: Path, monkeypatch: pytest.MonkeyPatch, wire: Wire):
    started().keep("how to use it", "1.0")
    monkeypatch.setenv("MCP_SANDBOX_DRIVER", "qemu")
    started().keep("how to use the other one", "1.0")
    monkeypatch.delenv("MCP_SANDBOX_DRIVER")
    os.write(wire.client_out, LINE)
    server = started()
    server.answer(wire.server_in, wire.server_out)
    assert server.told == "how to use it"
    assert len(kept(home)) == 2


def test_only_so_many_greetings_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(early.KEPT + 2):
        monkeypatch.setenv("MCP_SANDBOX_DRIVER", str(number))
        started().keep("how to use it", "1.0")
    assert len(kept(home)) == early.KEPT


def test_secrets_are_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_WEB_EXA_KEY", "s3cret")
    started().keep("how to use it", "1.0")
    assert "s3cret" not in kept(home)[0].read_text()


def test_a_home_below_the_working_directory_is_not_believed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_HOME", "cache")
    started().keep("how to use it", "1.0")
    assert list(Path.cwd().iterdir()) == []
