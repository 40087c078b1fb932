"""Templates from OCI images and Dockerfiles, with the real tools and real machines."""

import importlib.util
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest

from mcp_sandbox.app import Host
from templates.build import Builder, Progress
from templates.errors import BuildFailed
from templates.model import ServiceCommand, Template
from templates.store import Entry, Store
from templates.tools import LoggedTools
from templates.update import Update, find_updates
from tests.functional.images import (
    containers_untouched,
    debian_base,
    layer_of,
    registry,
    run_skopeo,
    static_busybox,
    write_layout,
)
from tests.functional.machines import Machines, only
from tests.waiting import BUILD_S, HANG_S
from vmm.process import find_tool

TOOLS = ("skopeo", "buildah", "mkfs.erofs", "apt-get", "dpkg")
SLEEP = "sleep 987654"  # unique among the host's processes
REST = "/context/busybox sleep 1000"
# IPython and its dependencies. All are pure Python, so the test environment's can be copied.
IPYTHON = (
    *("IPython", "ipython_pygments_lexers", "traitlets", "decorator", "jedi", "parso", "matplotlib_inline", "pexpect"),
    *("ptyprocess", "prompt_toolkit", "wcwidth", "pygments", "stack_data", "executing", "asttokens", "pure_eval"),
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vm,
    pytest.mark.skipif(any(find_tool(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]


def template(folder: Path, language: str = "shell", **source: str) -> Template:
    fields = {"title": "T", "description": "D", "machine": {"memory_mb": 256, "disk_mb": 64}}
    return Template.model_validate(
        {"name": f"test-{folder.name}", "folder": folder, "language": language, "source": source, **fields}
    )


def served(wanted: Template) -> Template:
    """Return the template with its image's ENTRYPOINT as a service."""
    return wanted.model_copy(update={"service": ServiceCommand(ready_cmd="[ -s /workspace/where ]")})


@pytest.fixture
async def store(host: Host) -> AsyncIterator[Store]:
    """The session's store, without the entries that a test added for its own templates."""
    yield host.store
    for entry in host.store.entries():
        if str(entry.details.get("template", "")).startswith("test-"):
            await host.store.remove(entry.kind, entry.key)
    assert list(host.store.home.glob("staging/*")) == []


@pytest.fixture
async def box(store: Store, tmp_path: Path) -> Path:
    """A directory with a static program, and a Dockerfile that runs it."""
    folder = tmp_path / "box"
    folder.mkdir()
    shutil.copy(await static_busybox(store), folder / "busybox")
    (folder / "busybox").chmod(0o755)
    (folder / "template.toml").write_text("# about the sandbox")
    (folder / "secret").write_text("not for the image")
    (folder / ".dockerignore").write_text("secret\n")
    (folder / "Dockerfile").write_text(
        "FROM scratch\n"
        "COPY . /context\n"
        'RUN ["/context/busybox", "mkdir", "/bin"]\n'
        'RUN ["/context/busybox", "ln", "/context/busybox", "/bin/sh"]\n'
        "RUN env > /environment && umask > /umask\n"
        "USER 7\nWORKDIR /srv\nENV GREETING=hello\n"
        'ENTRYPOINT ["/bin/sh", "-c", "pwd > /workspace/where; exec /context/busybox sleep 1000"]\n'
    )
    return folder


def layers_of(builder: Builder, wanted: Template) -> list[Entry]:
    return [entry for entry in builder.entries_of(wanted) if entry.kind == "layers"]


@only("gvisor", "bubblewrap")
async def test_an_image_with_a_single_program_runs_commands_and_its_entrypoint(
    host: Host, store: Store, box: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "of the host")
    monkeypatch.setenv("no_proxy", "mirror.example")  # does not affect apt
    wanted = served(template(box, dockerfile="Dockerfile"))
    with anyio.fail_after(BUILD_S), containers_untouched():
        machines = Machines(host, await host.builder.build(wanted, host.driver))
    async with machines.clone() as clone:
        output = (await clone.command('pwd; read where < where; echo "$where $GREETING"; /context/busybox id -un')).out
        assert output.split() == ["/workspace", "/srv", "hello", "sandbox"]
        assert (await clone.command("/context/busybox ls /context")).out.split() == ["Dockerfile", "busybox"]
        built_with = (await clone.command("/context/busybox cat /environment")).out
        assert "no_proxy=mirror.example" in built_with
        assert "SECRET_TOKEN" not in built_with
        assert (await clone.command("/context/busybox cat /umask")).out == "0022"
        assert "sleep" in (await clone.command("/context/busybox ps")).out
    await machines.assert_none_left()
    (layers,) = layers_of(host.builder, wanted)
    assert set(layers.details["config"]["env"]) == {"GREETING", "PATH"}, "the image does not keep the proxy"
    assert [note.split()[0] for note in host.builder.image_notes(wanted)] == ["USER", "WORKDIR"]


@only("gvisor")
async def test_a_python_template_needs_python_in_its_image(host: Host, store: Store, box: Path):
    with anyio.fail_after(BUILD_S), pytest.raises(BuildFailed, match="this image has no python3 on its PATH"):
        await host.builder.build(template(box, "python", dockerfile="Dockerfile"), host.driver)


@only("gvisor")
async def test_code_runs_in_the_images_python_with_the_images_settings(host: Host, store: Store, tmp_path: Path):
    folder = tmp_path / "python"
    folder.mkdir()
    layers = [(await debian_base(store)).read_bytes(), layer_of(_ipython("opt/libraries"))]
    write_layout(folder / "layout", layers, Env=["PYTHONPATH=/opt/libraries", "PATH=/usr/bin:/bin", "GREETING=hello"])
    with anyio.fail_after(BUILD_S):
        made = await host.builder.build(template(folder, "python", oci="oci:layout"), host.driver)
    machines = Machines(host, made)
    with anyio.fail_after(HANG_S):
        async with machines.clone() as clone:
            ran = await clone.run(
                "import getpass, os, sys\n"
                "print(sys.executable, os.getcwd(), getpass.getuser())\n"
                "print(os.environ['GREETING'], os.environ['PYTHONPATH'].split(':')[-1])"
            )
    assert ran.out.split() == ["/usr/bin/python3", "/workspace", "sandbox", "hello", "/opt/libraries"]
    await machines.assert_none_left()


def _ipython(place: str) -> dict[str, bytes | Path]:
    """Return IPython's packages and modules by their paths in the image."""
    specs = [spec for name in IPYTHON if (spec := importlib.util.find_spec(name)) and spec.origin]
    files = [Path(str(spec.origin)) for spec in specs]
    found = [file.parent if file.name == "__init__.py" else file for file in files]
    return {f"{place}/{path.name}": path for path in found}


@only("gvisor")
async def test_images_are_fetched_by_tag_and_by_verified_digest(host: Host, store: Store, tmp_path: Path):
    digest = write_layout(tmp_path / "layout", [layer_of({"hello": b"one"})], User="app")
    other = write_layout(tmp_path / "other", [layer_of({"hello": b"two"})])
    folder = tmp_path / "pulled"
    folder.mkdir()
    with containers_untouched():
        async with registry(store, tmp_path) as address:
            _push(tmp_path / "layout", f"{address}/box:1")
            names = (":1", f"@{digest}", f":1@{digest}")
            by_tag, *by_digest = (template(folder, oci=f"{address}/box{name}") for name in names)
            for wanted in (by_tag, *by_digest):
                await host.builder.build_image(wanted)
            assert [entry.details["digest"] for entry in layers_of(host.builder, by_tag)] == [digest] * 3

            _push(tmp_path / "other", f"{address}/box:1")
            before = layers_of(host.builder, by_tag)
            await host.builder.build_image(by_tag)
            assert layers_of(host.builder, by_tag) == before, "a moved tag is not followed until asked"
            (update,) = await _updates_of(store, host.builder, by_tag, tmp_path / "work")
            assert [(upgrade.old, upgrade.new) for upgrade in update.upgrades] == [(digest, other)]
            await _forget(host.builder, store, by_tag)
            await host.builder.build_image(by_tag)
            assert [entry.details["digest"] for entry in layers_of(host.builder, by_tag)] == [other]

            (blob,) = (tmp_path / "registry").glob(f"**/blobs/sha256/*/{other.removeprefix('sha256:')}/data")
            blob.write_bytes(blob.read_bytes().replace(b"{", b"{ ", 1))
            with pytest.raises(BuildFailed, match="skopeo ended") as refused:
                await host.builder.build_image(template(folder, oci=f"{address}/box@{other}"))
            assert "does not match provided manifest digest" in refused.value.log_tail


async def _updates_of(store: Store, builder: Builder, wanted: Template, work: Path) -> list[Update]:
    """Return the updates of a template's image, without those of what all templates share."""
    work.mkdir()
    updates = await find_updates(store, builder.inventory, [wanted], LoggedTools(work / "log", print), work)
    return [update for update in updates if wanted.name in update.part]


def _push(layout: Path, name: str) -> None:
    options = ("--quiet", "--preserve-digests", "--dest-tls-verify=false")
    run_skopeo(layout, "copy", *options, f"oci:{layout}:latest", f"docker://{name}")


async def _forget(builder: Builder, store: Store, wanted: Template) -> None:
    for entry in builder.entries_of(wanted):
        await store.remove(entry.kind, entry.key)


@only("gvisor")
@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
async def test_images_come_from_files_and_are_rebuilt_when_those_change(
    host: Host, store: Store, tmp_path: Path, kind: str
):
    folder = tmp_path / "file"
    folder.mkdir()
    made = []
    for content in (b"one", b"two"):
        shutil.rmtree(tmp_path / "layout", ignore_errors=True)
        write_layout(tmp_path / "layout", [layer_of({"hello": content})])
        (folder / "image.tar").unlink(missing_ok=True)
        target = f"{kind}:{folder / 'image.tar'}:box:1"
        run_skopeo(tmp_path, "copy", "--quiet", f"oci:{tmp_path / 'layout'}:latest", target)
        made.append(await host.builder.build_image(template(folder, oci=f"{kind}:image.tar")))
    assert made[0] != made[1]
    with pytest.raises(BuildFailed, match="does not exist"):
        await host.builder.build_image(template(folder, oci=f"{kind}:missing.tar"))


@only("gvisor")
async def test_a_cancelled_dockerfile_leaves_no_process_and_no_file(store: Store, box: Path, host: Host):
    with (box / "Dockerfile").open("a") as dockerfile:
        dockerfile.write(f"RUN (/context/busybox setsid /context/busybox {SLEEP} &) && echo going to sleep && {REST}\n")
    children = psutil.Process().children()
    with anyio.fail_after(BUILD_S):
        async with anyio.create_task_group() as tasks:

            def cancel_in_the_middle(progress: Progress) -> None:
                if progress.message == "going to sleep":
                    tasks.cancel_scope.cancel()

            tasks.start_soon(Builder(store, cancel_in_the_middle).build_image, template(box, dockerfile="Dockerfile"))
    assert tasks.cancel_scope.cancelled_caught
    assert list(store.home.glob("staging/*")) == []
    assert psutil.Process().children() == children
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(box) in command or SLEEP in command] == []
