"""What a test session has to itself: homes, temporary files, and settings that are not the developer's.

    <home>-tests/<session>/<worker>/   the home of one process that runs tests
    <home>-tests/kept/                 slow downloads that only tests need, kept for the next session

`<home>` is the developer's. A test home starts with hard links to everything built there, so nothing is built twice.
Its directories are its own, and directories are what servers lock: a server of the developer is never in the way.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import platformdirs

from mcp_sandbox.config import APP, ENV_PREFIX, load_settings
from templates.chosen_program import FILE_NAME as PROGRAMS
from templates.locks import hold
from templates.revisions import FILE_NAME as REVISIONS
from templates.store import Entry, Store
from tests.footprint import files_in, groups, mounts, network, processes_with
from tests.waiting import LOOK_AGAIN_S, promised

KEPT = "kept"
KEPT_KINDS = {"emulatedhost", "interpreter", "nodetools", "testregistry"}
TEMPORARY = "tmp"  # a link in a session's directory to its temporary files


_entered: list["TestSession"] = []


def current() -> "TestSession":
    """The session that this process runs tests of."""
    return _entered[-1]


@dataclass(frozen=True, slots=True)
class TestSession:
    """The directories of a session; all processes that run its tests share them."""

    __test__ = False  # not a test, whatever its name looks like to pytest

    developer: Path  # the developer's own home
    root: Path
    temporary: Path

    @classmethod
    def begin(cls) -> "TestSession":
        """Make the directories. A lock on the first shows later sessions that this one is alive."""
        developer = load_settings().home
        parent = _parent(developer)
        parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(parent)
        root = Path(tempfile.mkdtemp(prefix="", dir=parent))
        root.chmod(0o755)  # a machine's own user has to reach the tree it runs in
        fcntl.flock(os.open(root, os.O_RDONLY), fcntl.LOCK_EX)  # held until this process ends
        temporary = Path(tempfile.mkdtemp(prefix="mcp-tests-"))
        (root / TEMPORARY).symlink_to(temporary)
        return cls(developer, root, temporary)

    @classmethod
    def of(cls, words: Sequence[str]) -> "TestSession":
        """The session that another process has begun."""
        return cls(*map(Path, words))

    def words(self) -> list[str]:
        """What `of` makes a session from."""
        return [str(self.developer), str(self.root), str(self.temporary)]

    def enter(self, worker: str) -> None:
        """Give this process and all it starts a home, a temporary directory and default settings."""
        os.umask(0o022)  # the developer's may hide files from the users that machines run as
        for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
            del os.environ[name]
        config = self.root / f"{worker}.config"
        _link_config(Path(platformdirs.user_config_dir()), config)
        home = self.root / worker
        home.mkdir()
        _entered.append(self)
        os.environ |= {
            f"{ENV_PREFIX}HOME": str(home),
            "XDG_CONFIG_HOME": str(config),
            "PYTEST_DEBUG_TEMPROOT": tempfile.gettempdir(),  # where failed tests' files stay after the session
            "TMPDIR": str(self.temporary),
            "COLUMNS": "200",  # not the width of the terminal that happens to be there
        }
        tempfile.tempdir = None  # read TMPDIR again

    def link_builds(self) -> None:
        """Put everything into this process's home that was built before."""
        home = load_settings().home
        _link_builds(_parent(self.developer) / KEPT, home)
        _link_builds(self.developer, home)

    def new_home(self, name: str, kinds: Container[str] | None = None) -> Path:
        """Make another home, with what this process's home has built: all of it, or only these kinds."""
        home = self.root / f"{load_settings().home.name}-{name}"
        _link_builds(load_settings().home, home, kinds)
        return home

    def leftovers(self, within_s: float | None = None) -> list[str]:
        """What tests have left behind, after the time that the product promises to need for cleaning up."""
        until = time.monotonic() + (promised() if within_s is None else within_s)
        while (left := list(self._look())) and time.monotonic() < until:
            time.sleep(LOOK_AGAIN_S)
        return left

    def end(self) -> None:
        """Remove the directories, but for slow downloads."""
        kept = _parent(self.developer) / KEPT
        for home in self._homes():
            for entry in Store(home).entries():
                if entry.kind in KEPT_KINDS and not (kept / entry.kind / entry.key).exists():
                    (kept / entry.kind).mkdir(parents=True, exist_ok=True)
                    entry.path.rename(kept / entry.kind / entry.key)
        _remove(self.root)

    def _look(self) -> Iterator[str]:
        paths = (self.root, self.temporary)
        yield from (f"process {process}" for process in processes_with(*paths))
        yield from (f"mount {line}" for line in mounts(*paths))
        yield from (f"file {path}" for path in self.temporary.iterdir())
        for home in self._homes():
            yield from (f"cgroup {group}" for group in groups(home / "run"))
            yield from network(home / "run")
            yield from (f"file {path}" for name in ("run", "staging") for path in files_in(home / name))

    def _homes(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]


def _link_builds(source: Path, home: Path, kinds: Container[str] | None = None) -> None:
    for entry in Store(source).entries():
        if kinds is None or entry.kind in kinds:
            _link_entry(entry, home)
    for name in (REVISIONS, PROGRAMS):
        if (source / name).is_file():
            home.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, home)
    if (source / "cache").is_dir():
        shutil.copytree(source / "cache", home / "cache", dirs_exist_ok=True)


def _link_entry(entry: Entry, home: Path) -> None:
    """Put an entry of a store into the store at `home` as hard links, unless it is being removed."""
    target = home / entry.kind / entry.key
    with suppress(FileNotFoundError), hold([entry.path]):
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = partial(subprocess.run, check=False, stderr=subprocess.PIPE)
        if copy(["cp", "--archive", "--link", entry.path, target]).returncode != 0:  # another file system
            shutil.rmtree(target, ignore_errors=True)
            copy(["cp", "--archive", entry.path, target]).check_returncode()


def _parent(developer: Path) -> Path:
    return developer.with_name(f"{developer.name}-tests")


def _link_config(developers: Path, config: Path) -> None:
    """Everything the developer has configured but our own product."""
    config.mkdir()
    for path in developers.iterdir() if developers.is_dir() else ():
        if path.name != APP:
            (config / path.name).symlink_to(path)


def _remove_dead(parent: Path) -> None:
    """Remove the directories of sessions that were killed."""
    for root in parent.iterdir():
        if root.name == KEPT:
            continue
        with suppress(OSError):  # another session is quicker
            directory = os.open(root, os.O_RDONLY)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(root)
            finally:
                os.close(directory)


def _remove(root: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree((root / TEMPORARY).readlink(), ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
