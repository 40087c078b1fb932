"""Programs of a build have private directories for temporary files, and nothing of the operator's environment."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from templates.environment import certificates, pip_settings, proxies
from templates.namespaces import COVERED, Private
from templates.tools import LoggedTools, StepFailed
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio
# By name, not those of `templates.namespaces`: each of them must be private.
PLACES = [place for place in ("/tmp", "/var/tmp", "/dev/shm", "/run/user") if os.access(place, os.W_OK)]
# Runs a build's program that uses the directory of users, on a host whose /run is a new one.
USE_RUN_USER = """
import anyio, sys
from pathlib import Path
from templates.namespaces import Private
from templates.tools import LoggedTools
command = ["sh", "-c", "cat /run/user/file; mkdir -p /run/user/0 && echo own > /run/user/0/file && echo done; true"]
private = Private(Path(sys.argv[1], "scratch"), subordinate_ids=False)
for line in anyio.run(lambda: LoggedTools(Path(sys.argv[1], "log"), print).run(command, private=private)):
    pass
"""
NEW_RUN = 'mount -t tmpfs tmpfs /run; "$@"; echo; find /run -type f -o -name user'


@pytest.fixture(params=["as this user", "as root of a user namespace"])
def private(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Private:
    if request.param != "as this user":
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
    return Private(tmp_path / "scratch", (tmp_path / "needed",), subordinate_ids=False)


@pytest.fixture
def planted() -> Iterator[str]:
    """The name of a file that another user has created in all directories for temporary files."""
    name = f"mcp-sandbox-test-{secrets.token_hex(4)}"
    for place in PLACES:
        Path(place, name).write_text("planted")
    yield name
    for place in PLACES:
        Path(place, name).unlink()


async def test_temporary_files_are_private_and_gone_afterwards(tmp_path: Path, private: Private, planted: str):
    tools = LoggedTools(tmp_path / "log", lambda line: None)
    script = 'for place in "$@"; do cat "$place"/* 2>/dev/null; echo own > "$place/NAME" && echo "$place"; done'
    with anyio.fail_after(HANG_S):
        output = await tools.run(["sh", "-c", script.replace("NAME", planted), "sh", *PLACES], private=private)
    assert output == PLACES, "neither an error nor the content of the planted files"
    for place in PLACES:
        assert Path(place, planted).read_text() == "planted"
    assert not private.scratch.exists()


@pytest.mark.parametrize("planted", [True, False])
def test_a_program_neither_sees_the_directory_of_users_nor_makes_one(tmp_path: Path, planted: bool):
    prepare = "mkdir /run/user; echo planted > /run/user/file;" if planted else ""
    users = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = [sys.executable, "-c", USE_RUN_USER, str(tmp_path)]
    shell = ["sh", "-c", NEW_RUN.replace(";", f"; {prepare}", 1), "sh"]
    ran = subprocess.run(["unshare", *users, "--mount", *shell, *command], capture_output=True, text=True)
    printed, _, left = ran.stdout.partition("\n\n")
    assert "planted" not in printed
    assert ("done" in printed) is planted, ran.stderr
    assert left.split() == (["/run/user", "/run/user/file"] if planted else [])


async def test_what_a_program_needs_below_a_covered_directory_stays_visible(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("content")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "hidden").write_text("")
    tools = LoggedTools(tmp_path / "log", lambda line: None)
    visible = (tmp_path / "folder/file", tmp_path / "link")
    private = Private(tmp_path / "scratch", visible, subordinate_ids=False)
    script = (
        'cat "$1/folder/file" "$1/link/file"; echo; echo changed > "$1/link/new"; [ ! -e "$1/hidden" ] && echo hidden'
    )
    with anyio.fail_after(HANG_S):
        output = await tools.run(["sh", "-c", script, "sh", str(tmp_path)], private=private)
    assert output[0] == "contentcontent"
    if any(tmp_path.is_relative_to(place) for place in COVERED):  # it is, unless pytest was given another directory
        assert output[1:] == ["hidden"]
    assert (tmp_path / "folder/new").read_text() == "changed\n"


async def test_processes_that_a_program_leaves_end_with_it(tmp_path: Path, private: Private):
    tools = LoggedTools(tmp_path / "log", lambda line: None)
    (tmp_path / "needed").mkdir()
    os.mkfifo(tmp_path / "needed/alive")
    left = 'setsid sh -c "echo started; exec sleep 1000" >"$1" 2>&1 & read -r line <"$1"; echo "$line"'
    with anyio.fail_after(HANG_S):
        output = await tools.run(["sh", "-c", left, "sh", str(tmp_path / "needed/alive")], private=private)
        assert output == ["started"]
        # The end of the file comes when no process has the pipe open for writing.
        reader = os.open(tmp_path / "needed/alive", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert await anyio.to_thread.run_sync(os.read, reader, 1) == b""
        finally:
            os.close(reader)


async def test_a_failing_program_is_named_and_leaves_nothing(tmp_path: Path, private: Private):
    with pytest.raises(StepFailed, match="sh ended with status 3"):
        await LoggedTools(tmp_path / "log", lambda line: None).run(["sh", "-c", "exit 3"], private=private)
    assert not private.scratch.exists()


async def test_a_program_gets_the_proxies_and_nothing_else_of_the_operators_environment(
    tmp_path: Path, private: Private, monkeypatch: pytest.MonkeyPatch
):
    for name in ("SECRET_TOKEN", "HTTPS_PROXY", "no_proxy", "PIP_INDEX_URL", "SSL_CERT_FILE", "proxy_password"):
        monkeypatch.setenv(name, f"value of {name}")
    everything = "env; for process in /proc/[0-9]*; do tr '\\0' '\\n' < $process/environ; done 2>/dev/null"
    with anyio.fail_after(HANG_S):
        printed = await LoggedTools(tmp_path / "log", lambda line: None).run(["sh", "-c", everything], private=private)
    set_here = {name for name in os.environ if name.lower().endswith("_proxy")}
    expected = {*set_here, "PATH", "LC_ALL", "PWD", "_", "SHLVL", "OLDPWD"}
    assert {line.partition("=")[0] for line in printed} <= expected
    assert {"HTTPS_PROXY=value of HTTPS_PROXY", "no_proxy=value of no_proxy"} <= set(printed)


def test_only_pip_gets_pips_settings(monkeypatch: pytest.MonkeyPatch):
    names = ("PIP_INDEX_URL", "SSL_CERT_FILE", "SECRET_TOKEN", "https_proxy", "XPIP_X")
    for name in names:
        monkeypatch.setenv(name, "x")
    assert [name for name in names if name in pip_settings()] == ["PIP_INDEX_URL", "SSL_CERT_FILE"]
    assert [name for name in names if name in certificates()] == ["SSL_CERT_FILE"]
    assert [name for name in names if name in proxies()] == ["https_proxy"]
