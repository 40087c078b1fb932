"""`mcp-sandbox template …`: what it writes, prints and removes."""

import json
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner, Result

from guest.languages import NAMES, language
from mcp_sandbox import cli
from mcp_sandbox.commands import template, template_watch
from mcp_sandbox.commands.template_build import driver_notes
from mcp_sandbox.commands.template_init import text_of, write_template
from mcp_sandbox.commands.template_watch import Watch
from mcp_sandbox.views import TemplateView
from templates.catalogue import BUILT_IN, Catalogue
from templates.locks import hold
from templates.model import SourceKind
from templates.store import Store
from templates.template_file import read_template
from tests.unit.test_template_model import GOOD
from vmm.driver import DRIVERS, DriverConfig, load_driver


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's templates."""
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MCP_SANDBOX_TEMPLATE_PATH", str(tmp_path / "templates"))
    monkeypatch.setenv("MCP_SANDBOX_DRIVER", "bubblewrap")  # the quickest one to ask
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path / "templates"


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["template", *words])


# -- init --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", NAMES)
@pytest.mark.parametrize("source", typing.get_args(SourceKind))
def test_a_new_template_is_valid_unchanged(tmp_path: Path, language: str, source: SourceKind):
    folder = write_template(tmp_path, "my-tools", language, source)
    written = read_template(folder / "template.toml")
    assert (written.name, written.title, written.language) == ("my-tools", "My tools", language)
    assert getattr(written.source, source) is not None
    if source == "dockerfile":
        dockerfile = (folder / str(written.source.dockerfile)).read_text()
        assert dockerfile.startswith("FROM docker.io/"), "a short name is not enough for buildah"
        assert ("pip install" in dockerfile and "ipython" in dockerfile) == (language == "python")


def test_a_new_template_is_valid_with_its_comments_uncommented(tmp_path: Path):
    text = text_of("my-tools", "python", "debian")
    for line in ('pool = "cold"', 'EXAMPLE = "value"', "[service]", "start_cmd", "ready_cmd"):
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    (tmp_path / "template.toml").write_text(text)
    written = read_template(tmp_path / "template.toml")
    assert (written.pool, written.env) == ("cold", {"EXAMPLE": "value"})
    assert written.service is not None


@pytest.mark.parametrize("name", ["cpp", "go", "java", "javascript", "r"])
def test_a_new_template_for_a_language_with_its_own_tools_shares_the_built_in_ones_image(tmp_path: Path, name: str):
    written = read_template(write_template(tmp_path, "my-tools", name, "debian") / "template.toml")
    shipped = Catalogue().load(language(name).template)
    assert (written.source, written.env) == (shipped.source, shipped.env)


def test_the_command_line_has_all_sources():
    assert cli.Source == SourceKind


def test_init_writes_to_the_search_path_and_prints_the_next_step(path: Path):
    done = run("init", "my-tools")
    assert done.exit_code == 0
    assert Catalogue([path]).load("my-tools").language == "python"
    assert run("init", "my-image", "--source", "oci").exit_code == 0
    assert Catalogue([path]).load("my-image").language == "shell"
    assert f"Wrote {path}/my-tools/template.toml" in done.stderr
    assert "mcp-sandbox template build my-tools" in done.stderr


def test_init_outside_the_search_path_says_so(tmp_path: Path):
    done = run("init", "my-tools", "--dir", str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "my-tools" / "template.toml").is_file()
    assert "not on the search path" in done.stderr


def test_init_without_a_search_path_asks_for_a_directory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_TEMPLATE_PATH", ":")
    done = run("init", "my-tools")
    assert done.exit_code == 1
    assert "name one with --dir" in done.stderr


def test_init_overwrites_nothing(path: Path):
    assert run("init", "my-tools").exit_code == 0
    (path / "my-tools" / "template.toml").write_text("mine")
    done = run("init", "my-tools")
    assert (done.exit_code, (path / "my-tools" / "template.toml").read_text()) == (1, "mine")
    assert "already exists" in done.stderr


def test_init_refuses_an_invalid_name(path: Path):
    done = run("init", "My_Tools")
    assert done.exit_code == 1
    assert "lower-case letters" in done.stderr
    assert not path.exists()


# -- list, show, build: errors ---------------------------------------------------------------------------


def add(path: Path, name: str, text: str = GOOD) -> None:
    (path / name).mkdir(parents=True, exist_ok=True)
    (path / name / "template.toml").write_text(text)


def test_list_shows_hidden_templates_and_errors(path: Path):
    add(path, "python-data-analysis")
    add(path, "broken", GOOD.replace('"T"', "1"))
    done = run("list")
    assert done.exit_code == 0
    assert f"python-data-analysis hides the one in {BUILT_IN}" in done.stderr
    assert f"{path}/broken/template.toml:2: title: Input should be a valid string" in done.stderr
    assert "has errors" in done.stdout


def test_the_json_list_has_every_template_with_its_size_and_its_errors(path: Path):
    add(path, "mine")
    add(path, "broken", GOOD.replace('"T"', "1"))
    done = run("list", "--json")
    assert (done.exit_code, done.stderr.count("Build a template")) == (0, 0)
    listed = {row["name"]: TemplateView.model_validate(row) for row in json.loads(done.stdout)}
    assert set(listed) == {"mine", "broken", *Catalogue().names()}
    mine, broken, standard = listed["mine"], listed["broken"], listed["python-data-analysis"]
    assert (mine.folder, mine.title, mine.memory_mb, mine.built, mine.build_bytes) == (
        f"{path}/mine",
        "T",
        512,
        False,
        0,
    )
    assert (broken.folder, broken.title, broken.built) == (f"{path}/broken", None, False)
    assert "title: Input should be a valid string" in str(broken.problem)
    assert (standard.folder, standard.language, standard.problem) == (None, "python", None)


def test_show_prints_where_a_template_is(path: Path):
    add(path, "mine")
    done = run("show", "mine")
    assert done.exit_code == 0
    assert f"mine from {path}/mine" in done.stdout
    assert '"suite": "bookworm"' in done.stdout


@pytest.mark.parametrize("command", [("build", "broken"), ("show", "broken"), ("remove", "broken")])
def test_a_template_with_errors_is_refused_with_all_of_them(path: Path, command: tuple[str, ...]):
    add(path, "broken", GOOD.replace('"T"', "1").replace("512", "5"))
    done = run(*command)
    assert done.exit_code == 1
    assert f"{path}/broken/template.toml:2: title:" in done.stderr
    assert f"{path}/broken/template.toml:9: machine.memory_mb:" in done.stderr


@pytest.mark.parametrize("name", DRIVERS)
def test_a_build_says_if_the_driver_does_not_limit_disks(name: str, tmp_path: Path):
    driver, plain = load_driver(name, DriverConfig(tmp_path, tmp_path)), Catalogue().load("python-minimal")
    limited = plain.resized(plain.machine.model_copy(update={"disk_iops": 1000}))
    said = [f"driver {name} keeps files in memory: disk_mb_per_s and disk_iops have no effect"]
    assert driver_notes(limited, driver) == (said if name in ("gvisor", "bubblewrap") else [])
    assert driver_notes(plain, driver) == []


def test_a_wrong_name_is_reported_before_anything_is_built(path: Path):
    done = run("build", "python-data-analysis", "pyhton")
    assert done.exit_code == 1
    assert "there is no template 'pyhton'; choose one of: " in done.stderr
    assert "driver" not in done.stderr


def test_show_prints_the_digest_of_a_tag(path: Path, tmp_path: Path):
    digest = f"sha256:{'0123' * 16}"

    async def fetch(_staging: Path) -> Mapping[str, Any]:
        return {"template": "mine", "digest": digest}

    source = GOOD[GOOD.index("[source") : GOOD.index("[machine")]
    add(path, "mine", GOOD.replace(source, '[source]\noci = "localhost:5000/box:2"\n'))
    anyio.run(Store(tmp_path / "home").obtain, "layers", {"image": "localhost:5000/box:1"}, fetch)
    done = run("show", "mine")
    assert done.exit_code == 0
    assert f"localhost:5000/box:1 was fetched as {digest}." in done.stdout, "not the tag that template.toml names now"


# -- prune -------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image that no template uses, on a host without drivers."""
    monkeypatch.setattr(template, "DRIVERS", ())

    async def write(staging: Path) -> Mapping[str, Any]:
        (staging / "file").write_text("x")
        return {"template": "gone"}

    return anyio.run(Store(tmp_path / "home").obtain, "image", {"made": "long ago"}, write).path


def test_prune_removes_unused_entries_and_their_locks(old: Path, tmp_path: Path):
    would = run("prune", "--dry-run")
    assert would.exit_code == 0
    assert "would be removed" in would.stdout
    assert old.exists()
    done = run("prune")
    assert done.exit_code == 0
    assert "Removed 1 of 1 entries" in done.stderr
    assert not old.exists()
    assert list((tmp_path / "home" / "locks").iterdir()) == []
    nothing = run("prune", "--dry-run")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "Nothing to remove.\n")


def test_prune_keeps_entries_in_use_and_says_so(old: Path):
    with hold([old]):
        would = run("prune", "--dry-run")
        done = run("prune", "--all")
    assert "in use" in would.stdout
    assert "in use" in done.stdout
    assert "Kept 1 that sandboxes or servers use" in done.stderr
    assert old.exists()


# -- watching ----------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_watch, "POLL_S", 0.01)


@pytest.mark.usefixtures("_quick")
async def test_every_change_of_a_watched_template_is_noticed_and_no_other_ones(path: Path):
    add(path, "mine")
    add(path, "other")
    watch = Watch(Catalogue([path]), ["mine"])

    async def changed() -> list[str]:
        with anyio.fail_after(10):
            return await watch.next()

    add(path, "other", GOOD.replace("512", "1024"))
    add(path, "mine", GOOD.replace("512", "1024"))
    assert await changed() == ["mine"]
    (path / "mine" / "context").mkdir()
    (path / "mine" / "context" / "data").write_text("1")
    assert await changed() == ["mine"]
    os.utime(path / "mine" / "context" / "data", ns=(1, 1))
    assert await changed() == ["mine"]
    add(path, "mine", "title =")
    assert await changed() == ["mine"], "the build reports the errors"


@pytest.mark.usefixtures("_quick")
async def test_watching_all_templates_includes_new_ones(path: Path):
    add(path, "mine")
    watch = Watch(Catalogue([path]), None)
    add(path, "new")
    (path / "mine" / "template.toml").unlink()
    with anyio.fail_after(10):
        assert await watch.next() == ["new"]
