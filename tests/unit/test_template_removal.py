"""Trees are removed by descriptors: no link is followed, not even one that appears while the removal runs."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from templates.removal import remove_tree

NAMES = [f"file-{number}" for number in range(20)]


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text("")
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory that must keep its files."""
    return filled(tmp_path / "victim")


@pytest.fixture
def swap(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Replaces every directory in a tree with a link to the victim as soon as its first file is removed."""

    def arm(tree: Path) -> None:
        unlink = os.unlink

        def unlink_and_swap(*args: Any, **options: Any) -> None:
            unlink(*args, **options)
            monkeypatch.setattr(os, "unlink", unlink)
            for number, path in enumerate([path for path in tree.iterdir() if path.is_dir()]):
                path.rename(tmp_path / f"moved-{number}")
                path.symlink_to(victim)

        monkeypatch.setattr(os, "unlink", unlink_and_swap)

    return arm


def test_a_link_that_is_swapped_in_during_the_removal_is_not_followed(
    tmp_path: Path, victim: Path, swap: Callable[[Path], None]
):
    tree = tmp_path / "tree"
    filled(tree / "folder")
    swap(tree)
    with suppress(OSError):  # the link is where a directory was
        remove_tree(tree)
    assert sorted(path.name for path in victim.iterdir()) == sorted(NAMES)
    remove_tree(tree)
    assert not tree.exists()
    assert sorted(path.name for path in victim.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("swapped", ["top", "inside"])
def test_a_link_that_takes_the_place_of_a_directory_right_before_it_is_opened_is_not_followed(
    tmp_path: Path, victim: Path, swapped: str, monkeypatch: pytest.MonkeyPatch
):
    tree = tmp_path / "tree"
    filled(tree / "folder")
    watched = tmp_path if swapped == "top" else tree
    open_file, swaps = os.open, 0

    def swap_and_open(name: Any, *args: Any, **options: Any) -> int:
        nonlocal swaps
        found = watched / name
        if not swaps and found.parent == watched and found != victim and found.is_dir():
            swaps += 1
            found.rename(tmp_path / "moved")
            found.symlink_to(victim)
        return open_file(name, *args, **options)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(NotADirectoryError):
        remove_tree(tree)
    assert swaps == 1
    assert sorted(path.name for path in victim.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("swapped", ["top", "inside"])
def test_a_link_is_removed_and_its_target_stays(tmp_path: Path, victim: Path, swapped: str):
    tree = tmp_path / "tree"
    if swapped == "inside":
        tree.mkdir()
    (tree / "link" if swapped == "inside" else tree).symlink_to(victim)
    remove_tree(tree)
    assert not os.path.lexists(tree)
    assert len(list(victim.iterdir())) == len(NAMES)


def test_files_missing_trees_and_closed_directories_are_no_obstacle(tmp_path: Path):
    remove_tree(tmp_path / "missing/tree")
    (tmp_path / "file").write_text("")
    remove_tree(tmp_path / "file")
    tree = tmp_path / "tree"
    for name, mode in (("unreadable", 0), ("unwritable", 0o500)):
        filled(tree / name / "inner").chmod(mode)
        (tree / name).chmod(mode)
    tree.chmod(0o500)
    remove_tree(tree)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_may_be_deeper_than_paths_and_recursion_allow(tmp_path: Path):
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(tree)
    assert not tree.exists()


def test_what_cannot_be_removed_is_an_error_and_the_rest_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = filled(tmp_path / "tree")
    unlink = os.unlink

    def refuse(name: str, **options: Any) -> None:
        if name == NAMES[3]:
            raise OSError(5, "a broken disk")
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match="a broken disk"):
        remove_tree(tree)
    assert [path.name for path in tree.iterdir()] == [NAMES[3]]
