"""`mcp-sandbox install`: what it writes into the files of clients, and what it leaves alone."""

import json
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.commands.install.clients import CLIENTS
from mcp_sandbox.commands.install.command import BACKUP, NAME, install, server_command

COMMAND, ARGS = server_command()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def file_of(client: str, text: str | None = None) -> Path:
    path = CLIENTS[client].file()
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.write_text(text)
    return path


def parsed(client: str) -> dict[str, Any]:
    text = file_of(client).read_text()
    content: dict[str, Any] = tomllib.loads(text) if CLIENTS[client].syntax == "toml" else json.loads(text)
    return content


@pytest.mark.parametrize(
    ("client", "where", "table"),
    [
        ("claude-code", ".claude.json", "mcpServers"),
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", "mcpServers"),
        ("vscode", ".config/Code/User/mcp.json", "servers"),
        ("cursor", ".cursor/mcp.json", "mcpServers"),
        ("zed", ".config/zed/settings.json", "context_servers"),
        ("codex", ".codex/config.toml", "mcp_servers"),
    ],
)
def test_a_client_without_configuration_gets_one_that_only_its_user_reads(home, client, where, table):
    assert install(client, undo=False, dry_run=False) == 0
    entry = parsed(client)[table][NAME]
    assert (entry["command"], entry["args"]) == (COMMAND, ARGS)
    assert stat.S_IMODE((home / where).stat().st_mode) == 0o600


def test_all_clients_of_the_table_are_tried_above():
    assert set(CLIENTS) == {"claude-code", "claude-desktop", "vscode", "cursor", "zed", "codex"}


OTHERS = (
    '{\n    "theme": "däk",\n    "mcpServers": {\n        "other": {\n            "command": "x"\n        }\n    }\n}\n'
)


def test_everything_else_in_a_file_stays_as_it_is_and_undo_gives_the_same_file_back():
    path = file_of("cursor", OTHERS)
    install("cursor", undo=False, dry_run=False)
    changed = path.read_text()
    assert {line.rstrip(",") for line in OTHERS.splitlines()} <= {line.rstrip(",") for line in changed.splitlines()}
    assert NAME in changed
    install("cursor", undo=True, dry_run=False)
    assert path.read_text() == OTHERS


def test_comments_and_order_of_a_toml_file_stay():
    text = '# mine\nmodel = "x"  # the best\n\n[mcp_servers.other]\ncommand = "y"\n'
    path = file_of("codex", text)
    install("codex", undo=False, dry_run=False)
    assert path.read_text().startswith(text)
    assert parsed("codex")["mcp_servers"][NAME] == {"command": COMMAND, "args": ARGS}
    install("codex", undo=True, dry_run=False)
    assert tomllib.loads(path.read_text()) == tomllib.loads(text)
    assert "# the best" in path.read_text()


def test_the_old_file_is_kept_with_its_mode():
    path = file_of("cursor", OTHERS)
    path.chmod(0o640)
    install("cursor", undo=False, dry_run=False)
    kept = path.with_name(path.name + BACKUP)
    assert kept.read_text() == OTHERS
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(kept.stat().st_mode) == 0o640


def test_a_second_time_changes_nothing(capsys):
    install("cursor", undo=False, dry_run=False)
    before = file_of("cursor").stat().st_mtime_ns
    capsys.readouterr()
    install("cursor", undo=False, dry_run=False)
    assert "nothing to change" in capsys.readouterr().out
    assert file_of("cursor").stat().st_mtime_ns == before


def test_undo_without_an_entry_changes_nothing(capsys):
    path = file_of("cursor", OTHERS)
    assert install("cursor", undo=True, dry_run=False) == 0
    assert path.read_text() == OTHERS
    assert not path.with_name(path.name + BACKUP).exists()


def test_a_dry_run_shows_the_change_and_writes_nothing(capsys):
    path = file_of("cursor", OTHERS)
    install("cursor", undo=False, dry_run=True)
    assert '+        "mcp-sandbox"' in capsys.readouterr().out
    assert path.read_text() == OTHERS


@pytest.mark.parametrize(
    "text",
    [
        '{\n  // dark\n  "theme": "x"\n}',
        '{"a": 1,}',
        "[]",
        '{"context_servers": []}',
        '{"context_servers": 3}',
        "{" * 100_000,
    ],
    ids=["comments", "trailing comma", "list", "servers are a list", "servers are a number", "deep"],
)
def test_a_file_that_could_lose_something_is_left_alone_and_the_user_gets_the_text(text, capsys):
    path = file_of("zed", text)
    assert install("zed", undo=False, dry_run=False) == 1
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert '"context_servers": {' in shown
    assert path.read_text() == text


def test_a_file_that_is_a_link_stays_one(home):
    real = home / "dotfiles.json"
    real.write_text("{}")
    path = file_of("cursor")
    path.symlink_to(real)
    install("cursor", undo=False, dry_run=False)
    assert path.is_symlink()
    assert NAME in real.read_text()


def test_an_unknown_client_is_told_which_are_known(capsys):
    assert install("emacs", undo=False, dry_run=False) == 1
    assert "claude-code, claude-desktop, vscode" in capsys.readouterr().err


def test_the_command_works_whatever_the_clients_path_is():
    assert Path(COMMAND).is_absolute()
    assert Path(COMMAND).exists()
    assert Path(COMMAND).parent == Path(sys.executable).parent


def test_a_file_that_is_no_text_is_left_alone(capsys):
    path = file_of("zed")
    path.write_bytes(b'{"theme": "\xff"}')
    assert install("zed", undo=False, dry_run=False) == 1
    assert '"context_servers": {' in capsys.readouterr().err
    assert path.read_bytes() == b'{"theme": "\xff"}'
