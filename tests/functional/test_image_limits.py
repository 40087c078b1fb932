"""Images, Dockerfiles and wheels that unpack to far more than they weigh are stopped while they are unpacked."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import load_settings
from templates import oci, steps
from templates.build import Builder
from templates.disk import disk_usage
from templates.errors import BuildFailed
from templates.model import Template
from templates.oci import make_oci
from templates.store import Store
from templates.tools import LoggedTools, StepFailed
from tests.functional.images import debian_base, run_skopeo, static_busybox, write_layout
from tests.waiting import BUILD_S
from vmm.process import find_tool

TOOLS = ("skopeo", "buildah", "mmdebstrap", "mkfs.erofs")
MB = 1024**2
BOMB = 600 * MB  # unpacked; packed it is half a megabyte

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(any(find_tool(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """The session's store, in which failed builds must leave nothing."""
    store = Store(load_settings().home)
    yield store
    assert list(store.home.glob("staging/*")) == []


def template(folder: Path, **source: object) -> Template:
    fields = {"title": "T", "description": "D", "machine": {"memory_mb": 256, "disk_mb": 64}}
    return Template.model_validate(
        {"name": f"test-{folder.name}", "folder": folder, "language": "shell", "source": source, **fields}
    )


class Zeros(io.RawIOBase):
    """A file of zeros that takes no memory."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1, /) -> bytes:
        chunk = bytes(min(self.left, MB) if size < 0 else min(self.left, size))
        self.left -= len(chunk)
        return chunk


def bomb_layer() -> bytes:
    """Return a layer with one file of zeros, packed with gzip."""
    packed = io.BytesIO()
    with gzip.open(packed, "wb", compresslevel=1) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = BOMB
        tar.addfile(info, Zeros(BOMB))
    return packed.getvalue()


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
async def test_a_layer_that_explodes_is_refused_while_it_is_unpacked(
    tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(oci, "SMALL", 32 * MB)
    write_layout(tmp_path / "gzip", [bomb_layer()])
    if packing == "zstd":
        pack = ("--quiet", "--dest-compress-format=zstd")
        run_skopeo(tmp_path, "copy", *pack, f"dir:{_unpacked(tmp_path)}", f"oci:{tmp_path / 'zstd'}:latest")
    assert disk_usage(tmp_path / packing) < 5 * MB
    staging = tmp_path / "staging"
    staging.mkdir()
    limit = oci.unpacked_limit(disk_usage(tmp_path / packing))
    assert limit < BOMB / 2
    with (
        anyio.fail_after(BUILD_S),
        pytest.raises(StepFailed, match="the image is refused: unpacked, it is larger than"),
    ):
        await make_oci(LoggedTools(tmp_path / "log", print), staging, template(tmp_path, oci=f"oci:{packing}"))
    assert not (staging / oci.LAYERS_TAR).exists()


def _unpacked(folder: Path) -> Path:
    """Unpack the image: skopeo only packs what is not packed."""
    run_skopeo(folder, "copy", "--quiet", "--dest-decompress", f"oci:{folder / 'gzip'}:latest", f"dir:{folder / 'dir'}")
    return folder / "dir"


async def test_a_dockerfile_that_writes_without_end_is_stopped(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(steps, "MAX_STEP", 64 * MB)
    folder = tmp_path / "endless"
    folder.mkdir()
    (folder / "busybox").write_bytes((await static_busybox(store)).read_bytes())
    (folder / "busybox").chmod(0o755)
    endless = '["/busybox", "dd", "if=/dev/zero", "of=/zeros", "bs=1M"]'
    (folder / "Dockerfile").write_text(f"FROM scratch\nCOPY busybox /busybox\nRUN {endless}\n")
    with anyio.fail_after(BUILD_S), pytest.raises(BuildFailed, match="its files are larger than 64 MB"):
        await Builder(store).build_image(template(folder, dockerfile="Dockerfile"))


async def test_a_wheel_that_explodes_is_stopped(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "bomb-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        with wheel.open("bomb/zeros", "w") as file:
            for _ in range(BOMB // MB):
                file.write(bytes(MB))
        wheel.writestr("bomb-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: bomb\nVersion: 1.0\n")
        wheel.writestr("bomb-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("bomb-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    base = (await debian_base(store)).stat().st_size
    monkeypatch.setattr(steps, "MAX_STEP", base + BOMB // 2)
    wanted = template(tmp_path, debian={"suite": "bookworm", "wheels": ["bomb==1.0"]})
    with anyio.fail_after(BUILD_S), pytest.raises(BuildFailed, match="its files are larger than"):
        await Builder(store).build_image(wanted)
