"""Which server a command uses, and what it says if there is none."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest
from typer.testing import CliRunner

from mcp_sandbox.cli import app
from mcp_sandbox.commands.remote.address import Address, find_server
from mcp_sandbox.commands.remote.client import refusal
from mcp_sandbox.commands.remote.copying import Place, parse_place
from mcp_sandbox.commands.remote.errors import BadUrl
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.metrics import Metrics
from mcp_sandbox.operating.operation import Operation
from mcp_sandbox.operating.registry import open_registry
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.start import connect_url
from tests.unit.fakes import FakeProvider

URL = "http://127.0.0.1:8123"


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Path]:
    """A home with a server that serves HTTP."""
    settings = Settings.model_validate({"home": tmp_path})
    async with open_registry(tmp_path) as registry:
        operation = Operation(settings, registry, Metrics(registry.own))
        async with (
            SandboxService(FakeProvider(), settings, operation) as service,
            operation.controlled(operation.panel(service, url=URL)),
        ):
            yield tmp_path


async def test_a_command_finds_the_server_of_its_home(home: Path):
    found = await anyio.to_thread.run_sync(partial(find_server, Settings(home=home, token="secret"), None))
    assert str(found) == URL
    assert found.headers == {"Authorization": "Bearer secret"}


async def test_an_address_comes_before_the_setting_and_the_server_of_the_home(home: Path):
    settings = Settings(home=home, connect="http://there:8000/mcp")
    assert str(find_server(settings, None)) == "http://there:8000"
    assert str(find_server(settings, "https://[::1]/proxied/mcp/")) == "https://[::1]:443/proxied"


def test_without_a_server_a_command_says_how_to_start_one(tmp_path: Path):
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "sandbox", "create"])
    assert result.exit_code == 1
    assert "Start one with `mcp-sandbox serve`, or name one with --url" in result.stderr


def test_a_server_that_does_not_answer_is_named(tmp_path: Path):
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "sandbox", "create", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer: Connection refused" in result.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_not_the_address_of_a_server_is_refused(url: str):
    with pytest.raises(BadUrl):
        Address.parse(url, None)


def test_a_token_that_would_break_a_header_is_refused():
    with pytest.raises(BadUrl):
        Address.parse(URL, "a\nb")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sb-1:data", Place("sb-1", "data")),
        ("sb-1:", Place("sb-1", ".")),
        ("./sb-1:data", None),
        ("/tmp/a:b", None),
        ("data", None),
        (":data", None),
    ],
)
def test_a_place_in_a_sandbox_has_an_id_before_its_colon(text: str, place: Place | None):
    assert parse_place(text) == place


def test_copying_needs_a_sandbox_on_one_side(tmp_path: Path):
    for paths in (("a", "b"), ("sb-1:a", "sb-2:b")):
        result = CliRunner().invoke(app, ["--home", str(tmp_path), "cp", *paths])
        assert result.exit_code == 1
        assert "as ID:PATH" in result.stderr


def test_an_answer_that_is_no_problem_is_reported_by_its_status():
    assert str(refusal(502, b"<html>")) == "The server answered with status 502."
    assert str(refusal(502, b"[]")) == "The server answered with status 502."


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_commands_even_if_a_shared_server_is_set(shell: str, monkeypatch: pytest.MonkeyPatch):
    words = {"COMP_WORDS": "mcp-sandbox san", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "mcp-sandbox san"}
    asked = {"_MCP_SANDBOX_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    assert connect_url([], {"MCP_SANDBOX_CONNECT": URL, **asked}) is None
    result = CliRunner().invoke(app, [], prog_name="mcp-sandbox", env=asked)
    assert "sandbox" in result.stdout
