"""Files that are executed, booted or obeyed are refused if another user could have changed them."""

import os
import re
from pathlib import Path

import pytest

from vmm.errors import Untrusted
from vmm.trust import make_private, open_trusted, read_trusted

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
SOMEBODY = 1_900_000_001


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program three directories down."""
    path = tmp_path / "home" / "runsc" / "key" / "runsc"
    path.parent.mkdir(parents=True, mode=0o755)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_file_of_ours_is_opened(program: Path):
    file = open_trusted(program)
    try:
        assert os.path.samestat(os.fstat(file), program.stat())
    finally:
        os.close(file)


@pytest.mark.parametrize("up", range(4))
@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_a_file_that_others_can_change_or_replace_is_refused(program: Path, up: int, mode: int):
    weak = (program, *program.parents)[up]
    weak.chmod(mode)
    with pytest.raises(Untrusted, match=f"^{re.escape(str(weak))} can be changed by other users.*chmod go-w"):
        read_trusted(program)
    weak.chmod(0o755)
    assert read_trusted(program) == b"#!/bin/sh\n"


@AS_ROOT
@pytest.mark.parametrize("up", range(4))
def test_a_file_or_directory_of_another_user_is_refused(program: Path, up: int):
    planted = (program, *program.parents)[up]
    os.chown(planted, SOMEBODY, SOMEBODY)
    with pytest.raises(Untrusted, match=f"^{re.escape(str(planted))} belongs to another user, {SOMEBODY}"):
        read_trusted(program)


@AS_ROOT
def test_a_group_with_other_members_may_not_write(program: Path):
    program.parent.chmod(0o775)
    assert read_trusted(program), "root's own group has no other member"
    os.chown(program.parent, 0, SOMEBODY)
    with pytest.raises(Untrusted, match="can be changed by other users"):
        read_trusted(program)


def test_a_link_is_followed_to_a_checked_place(program: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(program.parents[2])
    assert read_trusted(tmp_path / "link" / "runsc" / "key" / "runsc")
    program.parents[1].chmod(0o777)
    with pytest.raises(Untrusted):
        read_trusted(tmp_path / "link" / "runsc" / "key" / "runsc")


def test_in_a_sticky_directory_nobody_replaces_the_files_of_others(program: Path):
    program.parent.chmod(0o1777)
    assert read_trusted(program)
    with pytest.raises(Untrusted):  # but everybody can add files to it
        open_trusted(program.parent)


def test_a_pipe_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Untrusted, match="neither a file nor a directory"):
        open_trusted(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["none", "none/below"])
def test_a_missing_file_is_missing(tmp_path: Path, name: str):
    with pytest.raises(FileNotFoundError):
        open_trusted(tmp_path / name)


def test_a_directory_that_others_can_read_is_closed_to_them(tmp_path: Path):
    home = tmp_path / "home"
    assert not make_private(home)
    assert not home.exists()
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    assert make_private(home)
    assert home.stat().st_mode & 0o777 == 0o700
    assert not make_private(home)


def test_only_a_directory_becomes_private(tmp_path: Path):
    (tmp_path / "file").touch(mode=0o644)
    assert not make_private(tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_directory_that_others_could_write_to_is_refused_and_stays_as_it_is(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(Untrusted, match="can be changed by other users"):
        make_private(home)
    assert home.stat().st_mode & 0o777 == 0o777
