"""`initialize` is answered before settings and the SDK are imported, if it is there when the program starts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mcp_sandbox.serving.early import EarlyGreeting, greet_early
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

    def greet(self) -> EarlyGreeting:
        """Start a server on these pipes."""
        return greet_early(self.server_in, self.server_out)

    def unread(self) -> str:
        """Return what the server has sent."""
        os.close(self.server_out)
        return os.read(self.client_in, 1 << 16).decode()


@pytest.fixture
def wire() -> Iterator[Wire]:
    ends = Wire(*os.pipe(), *os.pipe())
    yield ends
    for fd in (ends.server_in, ends.client_out, ends.client_in):
        os.close(fd)


@pytest.fixture(autouse=True)
def config_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the user's configuration file would be."""
    (tmp_path / "mcp-sandbox").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "mcp-sandbox/mcp-sandbox.toml"


def test_a_request_that_is_there_is_answered_at_once_and_what_follows_it_is_kept(wire: Wire):
    os.write(wire.client_out, LINE + NEXT)
    assert wire.greet() == EarlyGreeting(LINE + NEXT, 1)
    assert wire.unread() == answer_to(INITIALIZE)


@pytest.mark.parametrize("sent", [b"", LINE[:20], NEXT, b"\xff\n"], ids=["nothing", "a part", "another", "garbage"])
def test_anything_else_is_kept_for_the_server(wire: Wire, sent: bytes):
    os.write(wire.client_out, sent)
    assert wire.greet() == EarlyGreeting(sent)
    assert not wire.unread()


def test_a_client_that_is_gone_is_left_to_the_server(wire: Wire):
    os.write(wire.client_out, LINE)
    os.dup2(wire.server_in, wire.client_in)  # nobody reads the answer
    assert wire.greet() == EarlyGreeting(LINE)


def test_a_server_that_connects_to_another_one_leaves_the_answer_to_it(wire: Wire, config_file: Path):
    config_file.write_text('connect = "http://127.0.0.1:8000/mcp"\n')
    os.write(wire.client_out, LINE)
    assert wire.greet() == EarlyGreeting()
    assert os.read(wire.server_in, 1 << 16) == LINE


def test_other_settings_do_not_delay_the_answer(wire: Wire, config_file: Path):
    config_file.write_text('driver = "qemu"\n')
    os.write(wire.client_out, LINE)
    assert wire.greet().answered == 1


def test_a_configuration_file_that_cannot_be_read_delays_the_answer(wire: Wire, config_file: Path):
    config_file.write_text("driver =\n")
    os.write(wire.client_out, LINE)
    assert wire.greet() == EarlyGreeting()
