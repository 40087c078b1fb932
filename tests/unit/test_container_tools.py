"""skopeo and buildah find the user's logins, and have private directories."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from templates import container_tools
from templates.container_tools import run_container_tool
from templates.namespaces import COVERED, Private
from templates.tools import StepFailed

pytestmark = pytest.mark.anyio


class Recorder:
    """Stands in for the tools of a step and records what they are given."""

    env: Mapping[str, str] = {}
    private: Private | None = None

    async def run(
        self,
        argv: Sequence[str],
        *,
        private: Private | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        assert env is not None
        self.env, self.private = env, private
        return [argv[0]]

    def note(self, text: str) -> None: ...


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty home and no logins."""
    monkeypatch.setattr(container_tools, "find_tool", lambda program: program)
    monkeypatch.setattr(container_tools, "LOGINS", ("{runtime}/auth.json", "{home}/config.json"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    for name in ("home", "runtime", "staging"):
        (tmp_path / name).mkdir()
    return tmp_path / "home"


async def test_all_their_directories_are_private(home: Path, tmp_path: Path):
    tools = Recorder()
    assert await run_container_tool(tools, tmp_path / "staging", "skopeo", "copy") == ["skopeo"]
    assert tools.private is not None
    assert tools.private.scratch.parent == tmp_path / "staging"
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        assert tools.env[name] in COVERED
    assert "REGISTRY_AUTH_FILE" not in tools.env


async def test_they_find_the_users_logins(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tools = Recorder()
    for login in (home / "config.json", tmp_path / "runtime/auth.json", tmp_path / "choice"):
        login.write_text("{}")
        if login.name == "choice":
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(login))
        await run_container_tool(tools, tmp_path / "staging", "skopeo")
        assert tools.env["REGISTRY_AUTH_FILE"] == str(login)
        assert tools.private is not None
        assert login in tools.private.visible


async def test_root_is_another_user_for_them_and_an_ordinary_user_is_not(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tools = Recorder()
    for uid, told in ((0, container_tools.NOBODY), (1234, 1234)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        await run_container_tool(tools, tmp_path / "staging", "buildah")
        assert tools.env["_CONTAINERS_ROOTLESS_UID"] == str(told)


async def test_they_get_no_secret_of_the_operator(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "of the operator")
    monkeypatch.setenv("PIP_INDEX_URL", "with a password")
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates")
    tools = Recorder()
    await run_container_tool(tools, tmp_path / "staging", "buildah")
    assert tools.env["SSL_CERT_FILE"] == "/certificates"
    assert {"SECRET_TOKEN", "PIP_INDEX_URL"}.isdisjoint(tools.env)


async def test_a_missing_tool_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(container_tools, "find_tool", lambda program: None)
    with pytest.raises(StepFailed, match="buildah is not installed; `mcp-sandbox setup --images` installs it"):
        await run_container_tool(Recorder(), tmp_path, "buildah")
