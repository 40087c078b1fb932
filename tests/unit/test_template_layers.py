"""Untrusted layers are merged into one tree, and nothing in them leads outside of it."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from templates import layers
from templates.layers import merge_layers
from templates.tools import StepFailed

File = tuple[str, str]  # name and content; a name with a slash at its end is a directory


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def layer(folder: Path, *members: File | tarfile.TarInfo) -> Path:
    """A layer with these files and other members."""
    path = folder / f"{len(list(folder.iterdir()))}.tar"
    with tarfile.open(path, "w") as tar:
        for wanted in members:
            if isinstance(wanted, tarfile.TarInfo):
                tar.addfile(wanted)
                continue
            name, content = wanted
            info = member(name, tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "layers").mkdir()
    return tmp_path / "layers"


def merged(folder: Path, *paths: Path, max_bytes: int = 1024**3) -> dict[str, str | None]:
    """Every name of the merged tree: content of files, target of links, None for directories."""
    target = folder.parent / "merged.tar"
    merge_layers(paths, target, max_bytes)
    with tarfile.open(target) as tar:
        return {info.name: _shown(tar, info) for info in tar}


def _shown(tar: tarfile.TarFile, info: tarfile.TarInfo) -> str | None:
    if info.isdir():
        return None
    if info.issym():
        return f"-> {info.linkname}"
    file = tar.extractfile(info)
    assert file is not None
    return file.read().decode()


def test_an_upper_layer_adds_replaces_and_removes(folder: Path):
    lower = layer(
        folder, ("etc/", ""), ("etc/a", "old"), ("etc/b", "stays"), ("gone", "x"), ("cache/", ""), ("cache/x", "")
    )
    upper = layer(folder, ("etc/a", "new"), (".wh.gone", ""), ("cache/.wh..wh..opq", ""), ("cache/y", "fresh"))
    assert merged(folder, lower, upper) == {
        "etc": None,
        "etc/a": "new",
        "etc/b": "stays",
        "cache": None,
        "cache/y": "fresh",
    }


def test_a_whiteout_applies_to_lower_layers_and_not_to_its_own(folder: Path):
    upper = layer(folder, ("file", "own"), (".wh.file", ""))
    assert merged(folder, layer(folder, ("file", "below")), upper) == {"file": "own"}


def test_a_repeated_directory_keeps_its_contents_and_a_file_replaces_them(folder: Path):
    lower = layer(folder, ("a/", ""), ("a/x", "1"), ("b/", ""), ("b/y", "2"))
    assert merged(folder, lower, layer(folder, ("a/", ""), ("b", "file"))) == {"a": None, "a/x": "1", "b": "file"}


def test_names_below_a_link_go_to_its_target_in_the_image(folder: Path):
    lower = layer(folder, ("usr/bin/", ""), member("bin", tarfile.SYMTYPE, "usr/bin"))
    assert merged(folder, lower, layer(folder, ("bin/tool", "1")))["usr/bin/tool"] == "1"


@pytest.mark.parametrize("target", ["/", "/..", "../../../..", "/proc/self/root", "loop"])
def test_a_link_never_leads_outside_the_image(folder: Path, target: str):
    hostile = layer(folder, member("loop", tarfile.SYMTYPE, target), ("loop/etc/shadow", "evil"))
    names = merged(folder, hostile)
    links = {name for name, shown in names.items() if shown and shown.startswith("->")}
    assert not any(name.startswith(f"{link}/") for name in names for link in links)
    assert [name for name in names if name.endswith("etc/shadow")] != []
    assert not any(name.startswith(("/", "..")) for name in names)


@pytest.mark.parametrize("name", ["../evil", "/../evil", "a/../../evil", ".wh.../x/../y"])
def test_a_name_that_leads_outside_is_refused(folder: Path, name: str):
    with pytest.raises(StepFailed, match="leads outside of it"):
        merged(folder, layer(folder, (name, "")))


def test_hard_links_are_kept_across_layers(folder: Path):
    lower = layer(folder, ("a", "same"), member("b", tarfile.LNKTYPE, "a"))
    upper = layer(folder, member("c", tarfile.LNKTYPE, "./b"))
    last = layer(folder, (".wh.a", ""), ("b", "other"))
    assert merged(folder, lower, upper) == {"a": "same", "b": "same", "c": "same"}
    with tarfile.open(folder.parent / "merged.tar") as tar:
        assert [info.islnk() for info in tar] == [False, True, True]
    assert merged(folder, lower, upper, last) == {"b": "other", "c": "same"}


@pytest.mark.parametrize("target", ["nothing", "/etc/passwd", "folder"])
def test_a_hard_link_to_a_missing_file_is_refused(folder: Path, target: str):
    with pytest.raises(StepFailed, match="hard link to a missing file"):
        merged(folder, layer(folder, ("folder/", ""), member("x", tarfile.LNKTYPE, target)))


def test_devices_pipes_and_set_user_id_bits_are_dropped(folder: Path):
    odd = layer(
        folder,
        member("disk", tarfile.BLKTYPE),
        member("pipe", tarfile.FIFOTYPE),
        ("dev/", ""),
        ("dev/null", ""),
        member("su", mode=0o6755),
        member("closed", tarfile.DIRTYPE, mode=0),
    )
    assert set(merged(folder, odd)) == {"su", "closed"}
    with tarfile.open(folder.parent / "merged.tar") as tar:
        assert {info.name: info.mode for info in tar} == {"su": 0o755, "closed": 0o700}


def test_an_image_that_is_too_large_is_refused_before_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StepFailed, match="too large"):
        merged(folder, layer(folder, ("a", "123456"), ("b", "123456")), max_bytes=10)
    monkeypatch.setattr(layers, "MAX_NAMES", 1)
    with pytest.raises(StepFailed, match="too large"):
        merged(folder, layer(folder, ("a", ""), ("b", "")))


def test_an_image_that_is_nested_too_deeply_is_refused(folder: Path):
    deep = "/".join("a" * 200)
    assert f"{deep}/file" in merged(folder, layer(folder, (f"{deep}/file", "")))
    for name in (f"{deep}/{deep}/file", f"link/{deep}/file"):
        with pytest.raises(StepFailed, match="nested more than 256 levels deep"):
            merged(folder, layer(folder, (f"{deep}/file", ""), member("link", tarfile.SYMTYPE, deep), (name, "")))


def test_implied_directories_count_towards_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "MAX_NAMES", 3)
    with pytest.raises(StepFailed, match="too large"):
        merged(folder, layer(folder, ("a/b/c/d", "")), layer(folder, ("e", "")))


def test_a_header_that_claims_a_huge_size_is_not_read(folder: Path):
    header = member("path", tarfile.XHDTYPE)
    header.size = 4 * 1024**3
    path = folder / "bomb.tar"
    path.write_bytes(header.tobuf())
    os.truncate(path, header.size + 8192)  # a hole, as from a layer of a few packed bytes
    with pytest.raises(StepFailed, match="a header of 4294967296 bytes"):
        merged(folder, path)


def test_a_sparse_file_counts_with_its_full_size(folder: Path):
    path = folder / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = member("huge")
        info.pax_headers = {"GNU.sparse.size": str(2 * 1024**3), "GNU.sparse.map": "0,0"}
        tar.addfile(info)
    assert path.stat().st_size < 20_000
    with pytest.raises(StepFailed, match="too large"):
        merged(folder, path)


def test_headers_that_would_fill_the_memory_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers.LayerFile, "headers_left", 64 * 1024)
    ordinary = [(f"{number}", "") for number in range(200)]
    assert len(merged(folder, layer(folder, *ordinary))) == len(ordinary)
    path = folder / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = member("pieces")
        info.pax_headers = {"GNU.sparse.size": "1", "GNU.sparse.map": ",".join("0" * 40_000)}
        tar.addfile(info)
    with pytest.raises(StepFailed, match="headers are larger"):
        merged(folder, path)


def test_a_file_that_is_not_a_layer_is_refused(folder: Path):
    damaged = folder / "damaged"
    damaged.write_bytes(b"not a tar file at all" * 100)
    with pytest.raises(StepFailed, match="damaged"):
        merged(folder, damaged)
    whole = layer(folder, ("a", "x" * 5000)).read_bytes()
    damaged.write_bytes(whole[:2000])
    with pytest.raises(StepFailed, match="damaged"):
        merged(folder, damaged)
