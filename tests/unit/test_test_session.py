"""A test session keeps away from the developer's home, and notices what its tests leave behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sandbox.config import load_settings
from templates.locks import hold
from templates.store import Store
from tests.session import TestSession


@pytest.fixture
def developer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The developer's home, with one entry in its store."""
    for name in ("COLUMNS", "PYTEST_DEBUG_TEMPROOT", "TMPDIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that it is restored
    monkeypatch.setattr("tests.session._entered", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(tmp_path / "dev"))
    entry = tmp_path / "dev/image/0123"
    entry.mkdir(parents=True)
    (entry / "rootfs").write_bytes(b"files")
    (entry / "meta.json").write_text(
        '{"id": "a", "inputs": {}, "details": {}, "made": "2026-01-01T00:00:00+00:00", "size_bytes": 1}'
    )
    return tmp_path / "dev"


@pytest.fixture
def session(developer: Path) -> TestSession:
    session = TestSession.begin()
    session.enter("main")
    return session


async def test_an_entry_that_the_developers_server_holds_is_free_in_a_test_home(developer: Path, session: TestSession):
    with hold([developer / "image/0123"]):
        session.link_builds()
        home = load_settings().home
        assert (home / "image/0123/rootfs").samefile(developer / "image/0123/rootfs")
        assert await Store(home).remove("image", "0123") == "removed"
    assert (developer / "image/0123/rootfs").read_bytes() == b"files"


def test_another_home_of_a_session_has_what_the_first_one_built(session: TestSession):
    session.link_builds()
    assert (session.new_home("other") / "image/0123/rootfs").exists()
    assert not (session.new_home("bare", kinds=()) / "image").exists()


def test_the_developers_settings_do_not_reach_tests(developer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "config"
    for name in ("mcp-sandbox", "pip"):
        (config / name).mkdir(parents=True)
    (config / "mcp-sandbox/mcp-sandbox.toml").write_text('driver = "qemu"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    monkeypatch.setenv("MCP_SANDBOX_ACCEL", "tcg")
    TestSession.begin().enter("main")
    assert (load_settings().driver, load_settings().accel) == ("auto", "auto")
    assert os.listdir(os.environ["XDG_CONFIG_HOME"]) == ["pip"]


def test_a_process_and_files_left_behind_are_reported(session: TestSession):
    assert session.leftovers(within_s=0) == []
    run = load_settings().run_dir
    run.mkdir()
    for path in (run / "disk", session.temporary / "scratch"):
        path.touch()
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = session.leftovers(within_s=0)
        process.kill()
    assert [line.split(":")[0] for line in left] == [
        f"process {process.pid}",
        f"file {session.temporary / 'scratch'}",
        f"file {run / 'disk'}",
    ]


def test_slow_downloads_are_kept_for_the_next_session_and_nothing_else(developer: Path, session: TestSession):
    session.link_builds()
    home = load_settings().home
    (home / "image").rename(home / "interpreter")
    session.end()
    assert not session.temporary.exists()
    assert [path.name for path in session.root.parent.iterdir()] == ["kept"]
    os.environ["MCP_SANDBOX_HOME"] = str(developer)
    later = TestSession.begin()
    later.enter("main")
    later.link_builds()
    assert {entry.kind for entry in Store(load_settings().home).entries()} == {"image", "interpreter"}


def test_the_directories_of_a_killed_session_are_removed_by_the_next(developer: Path):
    code = "from tests.session import TestSession; print(TestSession.begin().root)"
    killed = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )
    temporary = (killed / "tmp").readlink()
    assert temporary.is_dir()
    alive = TestSession.begin()
    assert not killed.exists()
    assert not temporary.exists()
    TestSession.begin()
    assert alive.root.exists()


def test_workers_take_whole_groups_of_tests(request: pytest.FixtureRequest):
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs workers of pytest-xdist: --numprocesses 2 --dist loadgroup")
    # Else each test is a group, and repeats long fixtures.
    assert request.node.nodeid.endswith("@unit-test_test_session-0")
