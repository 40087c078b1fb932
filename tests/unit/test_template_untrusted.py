"""An untrusted tree is prepared without following its links on the host, and its settings are validated."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from guest.agent import python_check
from guest.places import AGENT_PYTHON
from templates import image
from templates.build import Builder
from templates.dockerfile import dockerfile_inputs
from templates.errors import InvalidTemplate
from templates.image_config import ImageConfig, check_service, explain, from_details, read_config, to_details
from templates.model import Template
from templates.oci import LAYERS_TAR
from templates.snapshot import warm_up_of
from templates.tools import StepFailed, Tools
from templates.untrusted_tree import resolve_in
from tests.unit.test_template_build import FakeGvisor, Workshop, agent, builder, template, workshop
from vmm.agent import PYTHON

__all__ = ["agent", "builder", "workshop"]  # fixtures

SECRET = "root:secret-of-this-host:0:0:::\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A directory of this host that a hostile image links to."""
    (tmp_path / "host").mkdir()
    for name in ("passwd", "group", "hosts", "hostname"):
        (tmp_path / "host" / name).write_text(SECRET)
    return tmp_path / "host"


def untouched(host: Path) -> bool:
    return {path.name: path.read_text() for path in host.iterdir()} == dict.fromkeys(
        ("passwd", "group", "hosts", "hostname"), SECRET
    )


def test_an_empty_image_gets_everything_a_machine_needs(tree: Path):
    image.prepare_tree(tree)
    passwd = (tree / "etc/passwd").read_text().splitlines()
    assert [line.partition(":")[0] for line in passwd] == ["root", "sandbox"]
    assert passwd[1].endswith(":/bin/sh")
    assert (tree / "workspace").is_dir()
    assert (tree / "var/tmp").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("link", ["etc", "etc/passwd", "etc/hosts", "etc/hostname"])
def test_links_to_the_host_are_not_followed(tree: Path, host: Path, link: str):
    (tree / link).parent.mkdir(exist_ok=True)
    (tree / link).symlink_to(host if link == "etc" else host / Path(link).name)
    image.prepare_tree(tree)
    image.make_readable(tree)
    assert untouched(host)
    assert all(SECRET not in path.read_text() for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert "sandbox:" in resolve_in(tree, "etc/passwd").read_text()


@pytest.mark.parametrize("place", ["workspace", "tmp", "proc", "var"])
def test_a_mount_point_that_is_a_link_becomes_a_directory(tree: Path, host: Path, place: str):
    (tree / place).symlink_to(host)
    image.prepare_tree(tree)
    assert untouched(host)
    assert resolve_in(tree, place).is_dir()
    assert resolve_in(tree, place).is_relative_to(tree)


def test_links_are_resolved_as_in_a_machine(tree: Path):
    (tree / "usr/etc").mkdir(parents=True)
    (tree / "etc").symlink_to("/usr/../../usr/etc")
    assert resolve_in(tree, "/etc/passwd") == tree / "usr/etc/passwd"
    (tree / "loop").symlink_to("loop")
    with pytest.raises(StepFailed, match="too many symbolic links"):
        resolve_in(tree, "loop/x")


def test_writing_a_hard_linked_file_leaves_its_other_name_alone(tree: Path):
    (tree / "etc").mkdir()
    (tree / "precious").write_text("me:x:5:5:::\n")
    (tree / "etc/passwd").hardlink_to(tree / "precious")
    image.prepare_tree(tree)
    assert (tree / "precious").read_text() == "me:x:5:5:::\n"
    assert (tree / "etc/passwd").read_text().startswith("me:x:5:5:::\nsandbox:")


def test_user_code_has_its_own_account_name_even_if_the_id_is_taken(tree: Path):
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\nsandbox:x:7:7:::\n")
    image.prepare_tree(tree)
    lines = (tree / "etc/passwd").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["root", "sandbox", "node"]


@pytest.mark.anyio
async def test_a_changed_dockerfile_makes_the_previous_build_outdated(
    builder: Builder, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def make_interpreter(_tools: Tools, staging: Path) -> dict[str, str]:
        (staging / "root").mkdir()
        return {}

    async def unpack_image(_tools: Tools, staging: Path, template: Template, *_: str) -> dict[str, Any]:
        (staging / LAYERS_TAR).write_text("")
        return {"template": template.name, "config": to_details(ImageConfig(env={"A": "image"}))}

    monkeypatch.setattr("templates.interpreter.make_interpreter", make_interpreter)
    monkeypatch.setattr("templates.dockerfile.unpack_image", unpack_image)
    monkeypatch.setattr("templates.container_tools.find_tool", lambda program: program)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch")
    wanted, driver = template(folder=folder, source={"dockerfile": "Dockerfile"}), FakeGvisor()
    built = await builder.build(wanted, driver)
    assert workshop.ran == ["buildah", "tar", "mkfs.erofs"]
    assert built.warm_up.env == {"A": "image"}
    assert await builder.find(wanted, driver) == built
    assert await builder.outdated(wanted, driver) == []

    (folder / "Dockerfile").write_text("FROM scratch\nUSER app")
    assert await builder.find(wanted, driver) is None
    await builder.build(wanted, driver)
    assert sorted(entry.kind for entry in await builder.outdated(wanted, driver)) == ["image", "layers", "snapshot"]


def described(**settings: Any) -> dict[str, Any]:
    return {"os": "linux", "config": settings}


def test_an_images_settings_survive_being_stored():
    config = read_config(
        described(Env=["PATH=/opt/bin", "EMPTY=", "A=b=c"], Entrypoint=["/run me"], Cmd=["-v"], WorkingDir="/srv")
    )
    assert config == ImageConfig({"PATH": "/opt/bin", "EMPTY": "", "A": "b=c"}, ("/run me", "-v"), "/srv")
    assert from_details({"config": json.loads(json.dumps(to_details(config)))}) == config
    assert from_details({}) == read_config({"config": None}) == ImageConfig()


def test_the_templates_environment_overrides_the_images():
    config = read_config(described(Env=["A=image", "B=image"]))
    assert warm_up_of(template(env={"A": "template"}), config).env == {"A": "template", "B": "image"}


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {"config": 5},
        described(Env="PATH=/"),
        described(Env=[1]),
        described(Cmd=["a\0b"]),
        described(User=7),
        described(Env=["A=" + "x" * 9000]),
        {"os": "windows"},
        {"os": "linux", "architecture": "riscv128"},
    ],
)
def test_damaged_settings_are_refused(damaged: object):
    with pytest.raises(StepFailed, match="the image"):
        read_config(damaged)


def test_ignored_settings_are_explained():
    settings = {"Env": ["HOME=/root", "LD_PRELOAD=x.so"], "User": "app", "WorkingDir": "/srv", "Cmd": ["serve"]}
    config = read_config(described(**settings))
    assert config.env == {}
    notes = " ".join(explain(template(), config))
    for word in ("ENV HOME", "ENV LD_PRELOAD", "USER app", "WORKDIR /srv", "(serve) are not started: add a [service]"):
        assert word in notes
    served = explain(template(service={"ready_cmd": "true"}), config)
    assert "the service starts in it" in " ".join(served)
    assert "not started" not in " ".join(served)
    assert explain(template(), read_config(described(User="0", WorkingDir="/"))) == []


def test_a_service_needs_a_command():
    wanted = template(service={"ready_cmd": "true"})
    with pytest.raises(InvalidTemplate, match=r"service\.start_cmd: add it"):
        check_service(wanted, ImageConfig())
    check_service(wanted, ImageConfig(command=("serve",)))
    check_service(template(), ImageConfig())


@pytest.mark.parametrize(
    "source", [{"oci": "--option"}, {"dockerfile": "../Dockerfile"}, {"dockerfile": "/Dockerfile"}]
)
def test_a_source_cannot_be_an_option_or_outside_the_directory(source: dict[str, str]):
    with pytest.raises(ValueError, match="String should match pattern"):
        template(source=source)
    assert isinstance(template(source={"dockerfile": "images/Dockerfile.dev"}), Template)


def test_an_image_is_rebuilt_when_anything_in_its_context_changes(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    (tmp_path / "app").mkdir()
    (tmp_path / "app/link").symlink_to("x")
    wanted = template(folder=tmp_path, source={"dockerfile": "Dockerfile"})
    first = dockerfile_inputs(wanted)
    (tmp_path / "template.toml").write_text("# a new warm-up is none of its business")
    assert dockerfile_inputs(wanted) == first
    seen = [first]
    (tmp_path / "app/file").write_text("1")
    seen.append(dockerfile_inputs(wanted))
    (tmp_path / "app/file").write_text("22")
    seen.append(dockerfile_inputs(wanted))
    (tmp_path / "app/file").chmod(0o755)
    seen.append(dockerfile_inputs(wanted))
    (tmp_path / "app/link").unlink()
    (tmp_path / "app/link").symlink_to("y")
    seen.append(dockerfile_inputs(wanted))
    assert len({json.dumps(inputs) for inputs in seen}) == len(seen)


def test_the_error_for_an_image_without_ipython_says_what_to_add(monkeypatch: pytest.MonkeyPatch):
    assert python_check.unfit("python") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "RUN pip install ipython" in str(python_check.unfit("python"))
    monkeypatch.setattr("sys.version_info", (3, 9, 2, "final", 0))
    assert python_check.unfit("python") == "this image's python3 is 3.9.2, and code needs 3.11 or newer"
    monkeypatch.setattr("sys.executable", AGENT_PYTHON)
    assert "no python3" in str(python_check.unfit("python"))
    assert python_check.unfit("shell") is None


def test_python_code_runs_in_the_images_python_and_other_kernels_in_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "python3").write_text("")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"relative:{tmp_path / 'nothing'}:{tmp_path}")
    assert python_check.python_for("python") == [sys.executable], "an agent that runs in the tests' own Python"
    monkeypatch.setattr("sys.executable", AGENT_PYTHON)
    assert python_check.python_for("python") == [str(tmp_path / "python3")]
    assert python_check.python_for("shell") == [AGENT_PYTHON, "-I"]
    assert AGENT_PYTHON == PYTHON, "two rooms that do not import each other name the same program"


def test_the_python_check_can_be_parsed_by_old_pythons():
    ast.parse(Path(python_check.__file__).read_text(), feature_version=(3, 6))
