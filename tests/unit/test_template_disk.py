"""Builds check the disk before they start and while they run."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from templates import container_tools, disk, steps
from templates.disk import disk_usage, require_free, run_bounded
from templates.errors import BuildFailed
from templates.oci import unpack_image, unpacked_limit
from templates.steps import Steps
from templates.store import Store
from templates.tools import StepFailed, Tools
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from templates.model import Template

MB = 1024**2
pytestmark = pytest.mark.anyio
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def fill(folder: Path) -> None:
    """Write until cancelled, slowly enough to be measured in between."""
    with (folder / "big").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MB))
            await anyio.sleep(disk.POLL_S)


async def test_work_that_writes_too_much_is_cancelled(tmp_path: Path):
    with anyio.fail_after(HANG_S), pytest.raises(StepFailed, match="the files are larger than 8 MB"):
        await run_bounded(tmp_path, 8 * MB, "the files are", partial(fill, tmp_path))


async def test_work_that_ends_too_large_before_it_is_measured_is_refused(tmp_path: Path):
    async def write() -> None:
        (tmp_path / "big").write_bytes(bytes(9 * MB))

    with anyio.fail_after(HANG_S), pytest.raises(StepFailed, match="the files are larger than 8 MB"):
        await run_bounded(tmp_path, 8 * MB, "the files are", write)


async def test_work_within_its_bounds_returns_its_result_or_its_own_error(tmp_path: Path):
    async def fail() -> None:
        raise ValueError("of the work")

    async def succeed() -> str:
        return "done"

    assert await run_bounded(tmp_path / "not made yet", 0, "", succeed) == "done"
    with pytest.raises(ValueError, match="of the work"):
        await run_bounded(tmp_path, MB, "", fail)


@needs_root
async def test_work_is_cancelled_before_the_disk_is_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "RESERVE", 32 * MB)
    monkeypatch.setattr(disk, "POLL_S", 0.01)
    (small_disk / "staging").mkdir()
    with anyio.fail_after(HANG_S), pytest.raises(StepFailed, match=f"is free in {small_disk}, and builds leave 32 MB"):
        await run_bounded(small_disk / "staging", 1024 * MB, "", partial(fill, small_disk / "staging"))


@needs_root
async def test_a_step_says_how_much_space_it_needs_where_and_how_much_is_free(small_disk: Path):
    async def make(_tools: Tools, _staging: Path) -> dict[str, Any]:
        raise AssertionError("it must not begin")

    with pytest.raises(BuildFailed) as failed:
        await Steps(Store(small_disk), lambda progress: None).run("base", "base", {}, make)
    assert f"step 'base' needs 512 MB of disk space in {small_disk}/staging/base-" in failed.value.reason
    assert failed.value.reason.endswith("and only 64 MB is free")


@needs_root
def test_what_is_needed_is_added_to_what_stays_free(small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "RESERVE", 10 * MB)
    require_free(small_disk, 50 * MB, "the image")
    with pytest.raises(StepFailed, match=r"the image needs 70 MB .* only 64 MB is free"):
        require_free(small_disk, 60 * MB, "the image")


class Skopeo:
    """Stands in for the tools of a step; each copy of an image has 8 MB."""

    copies = 0

    async def run(self, argv: Sequence[str], **_options: object) -> list[str]:
        self.copies += 1
        copy = Path(argv[-1].removeprefix("dir:"))
        copy.mkdir()
        (copy / "layer").write_bytes(bytes(8 * MB))
        return []

    def note(self, text: str) -> None: ...


async def test_an_image_is_not_unpacked_where_the_disk_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(container_tools, "find_tool", lambda program: program)
    free = shutil.disk_usage(tmp_path)._replace(free=disk.RESERVE + 10 * MB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    skopeo = Skopeo()
    with pytest.raises(StepFailed, match=r"the image needs 528 MB of disk space .* only 522 MB is free"):
        await unpack_image(skopeo, tmp_path, cast("Template", None), "oci:image")
    assert skopeo.copies == 1


async def test_a_step_whose_files_grow_without_end_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(steps, "MAX_STEP", 8 * MB)

    async def make(_tools: Tools, staging: Path) -> dict[str, Any]:
        await fill(staging)
        return {}

    with anyio.fail_after(HANG_S), pytest.raises(BuildFailed, match="its files are larger than 8 MB"):
        await Steps(Store(tmp_path), lambda progress: None).run("image", "image", {}, make)
    assert list(tmp_path.glob("staging/*")) == []


def test_holes_take_no_space_and_hard_links_count_once(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(MB))
    (tmp_path / "link").hardlink_to(tmp_path / "file")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(100 * MB)
    assert MB <= disk_usage(tmp_path) < 2 * MB


def test_small_images_may_unpack_to_a_gigabyte_and_larger_ones_to_fifty_times_their_size():
    assert unpacked_limit(14 * MB) == 1024 * MB
    assert unpacked_limit(100 * MB) == 5000 * MB
    assert unpacked_limit(10_000 * MB) == 20 * 1024 * MB
