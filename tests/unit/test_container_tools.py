"""skopeo and buildah find the user's logins and leave no files behind."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from templates import container_tools
from templates.container_tools import run_container_tool
from templates.tools import StepFailed

pytestmark = pytest.mark.anyio


class Recorder:
    """Stands in for the tools of a step and records the environment."""

    env: Mapping[str, str] = {}

    async def run(
        self,
        argv: Sequence[str],
        *,
        isolated: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        assert env is not None
        self.env = env
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "TMPDIR"):
            (Path(env[name]) / "left").write_text("")
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


async def test_their_caches_are_removed_afterwards(home: Path, tmp_path: Path):
    tools = Recorder()
    assert await run_container_tool(tools, tmp_path / "staging", "skopeo", "copy") == ["skopeo"]
    assert list((tmp_path / "staging").iterdir()) == []
    assert "REGISTRY_AUTH_FILE" not in tools.env


async def test_they_find_the_users_logins(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tools = Recorder()
    for login in (home / "config.json", tmp_path / "runtime/auth.json"):
        login.write_text("{}")
        await run_container_tool(tools, tmp_path / "staging", "skopeo")
        assert tools.env["REGISTRY_AUTH_FILE"] == str(login)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/the/users/choice")
    await run_container_tool(tools, tmp_path / "staging", "skopeo")
    assert "REGISTRY_AUTH_FILE" not in tools.env, "it is in the environment already"


async def test_other_users_files_are_not_removed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(container_tools, "LEFTOVERS", (str(tmp_path / "traces-{uid}"),))
    (tmp_path / f"traces-{container_tools.NOBODY}").mkdir()
    await run_container_tool(Recorder(), tmp_path / "staging", "skopeo")
    assert (tmp_path / f"traces-{container_tools.NOBODY}").exists(), "it existed before"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    tools = Recorder()
    await run_container_tool(tools, tmp_path / "staging", "skopeo")
    assert tools.env["_CONTAINERS_ROOTLESS_UID"] == "1234"


async def test_a_missing_tool_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(container_tools, "find_tool", lambda program: None)
    with pytest.raises(StepFailed, match="buildah is not installed; `mcp-sandbox setup --images` installs it"):
        await run_container_tool(Recorder(), tmp_path, "buildah")
