"""The store: entries are complete or absent, and made once, however many processes want them."""

import contextvars
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest

from templates.locks import exclusive, hold, is_held
from templates.store import Entry, Store, key_of

INPUTS = {"suite": "bookworm", "packages": ["a", "b"]}
FORK = multiprocessing.get_context("fork")  # "spawn" would leave its resource tracker running
pytestmark = pytest.mark.anyio


async def make_hello(staging: Path) -> Mapping[str, Any]:
    (staging / "hello").write_text("hello")
    return {"version": "1"}


def left_in_staging(store: Store) -> list[Path]:
    return list(store.home.glob("staging/*"))


def test_a_key_depends_on_values_and_not_on_their_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})


async def test_an_entry_is_made_once_and_found_afterwards(tmp_path: Path):
    store = Store(tmp_path)
    assert store.find("base", INPUTS) is None
    entry = await store.obtain("base", INPUTS, make_hello)

    async def make_again(_staging: Path) -> Mapping[str, Any]:
        raise AssertionError("it exists already")

    assert await store.obtain("base", INPUTS, make_again) == entry == store.find("base", INPUTS)
    assert (entry.path / "hello").read_text() == "hello"
    assert left_in_staging(store) == []


async def test_an_entry_records_its_inputs_and_its_size(tmp_path: Path):
    store = Store(tmp_path)
    entry = await store.obtain("base", INPUTS, make_hello)
    assert store.entries() == [entry]
    assert store.entry(entry.path) == entry
    assert (entry.kind, entry.key, entry.inputs) == ("base", key_of(INPUTS), INPUTS)
    assert entry.details == {"version": "1"}
    assert entry.size_bytes > 0


async def test_an_entry_may_contain_any_kind_of_file_and_hard_links_count_once(tmp_path: Path):
    store = Store(tmp_path)

    async def make_tree(staging: Path) -> Mapping[str, Any]:
        deep = staging / "root/a/b"
        deep.mkdir(parents=True)
        (deep / "file").write_bytes(b"x" * 1_000_000)
        (deep / "again").hardlink_to(deep / "file")
        (deep / "up").symlink_to("../..")
        (deep / "nowhere").symlink_to("/nonexistent/path")
        os.mkfifo(deep / "pipe")  # opening one would block
        return {}

    with anyio.fail_after(30):
        entry = await store.obtain("tree", INPUTS, make_tree)
    assert (entry.path / "root/a/b/up").readlink() == Path("../..")
    assert 1_000_000 <= entry.size_bytes < 1_500_000
    assert [entry.kind for entry in store.entries()] == ["tree"]
    assert await store.remove("tree", key_of(INPUTS)) == "removed"
    assert left_in_staging(store) == []


async def test_a_failed_build_leaves_nothing(tmp_path: Path):
    store = Store(tmp_path)

    async def fail(staging: Path) -> Mapping[str, Any]:
        await make_hello(staging)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.obtain("base", INPUTS, fail)
    assert store.find("base", INPUTS) is None
    assert left_in_staging(store) == []
    await store.obtain("base", INPUTS, make_hello)


async def test_a_cancelled_build_leaves_nothing(tmp_path: Path):
    store = Store(tmp_path)
    async with anyio.create_task_group() as tasks:

        async def cancel_midway(staging: Path) -> Mapping[str, Any]:
            await make_hello(staging)
            tasks.cancel_scope.cancel()
            await anyio.sleep_forever()
            return {}

        await store.obtain("base", INPUTS, cancel_midway)
    assert store.find("base", INPUTS) is None
    assert left_in_staging(store) == []


async def test_two_concurrent_callers_make_an_entry_once(tmp_path: Path):
    made = []
    entered, go_on = anyio.Event(), anyio.Event()

    async def make(staging: Path) -> Mapping[str, Any]:
        made.append(staging)
        entered.set()
        await go_on.wait()
        return await make_hello(staging)

    found: list[Entry] = []

    async def want() -> None:
        found.append(await Store(tmp_path).obtain("base", INPUTS, make))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want)
            tasks.start_soon(want)
            await entered.wait()
            go_on.set()
    assert len(made) == 1
    assert found[0] == found[1]


def _make_and_hang(home: Path, started: Any) -> None:
    async def hang(staging: Path) -> Mapping[str, Any]:
        await make_hello(staging)
        started.send("ready")
        await anyio.sleep_forever()
        return {}

    contextvars.Context().run(anyio.run, Store(home).obtain, "base", INPUTS, hang)


async def test_leftovers_of_a_killed_process_are_removed_and_never_used(tmp_path: Path):
    store = Store(tmp_path)
    ready, started = FORK.Pipe(duplex=False)
    worker = FORK.Process(target=_make_and_hang, args=(tmp_path, started))
    worker.start()
    assert worker.pid
    assert await anyio.to_thread.run_sync(ready.poll, 30)
    assert len(left_in_staging(store)) == 1
    store.sweep()
    assert len(left_in_staging(store)) == 1, "the process is alive"
    os.kill(worker.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(worker.join, 30)
    worker.close()

    assert store.find("base", INPUTS) is None
    store.sweep()
    assert left_in_staging(store) == []
    with anyio.fail_after(10):
        assert await store.obtain("base", INPUTS, make_hello)


async def test_leftovers_are_removed_however_deeply_nested_and_links_are_not_followed(tmp_path: Path):
    store, kept = Store(tmp_path / "home"), tmp_path / "kept"
    kept.write_text("on the host")
    left = store.home / "staging" / "image-0123.left"
    left.mkdir(parents=True)
    (left / "link").symlink_to(tmp_path)
    folder = os.open(left, os.O_RDONLY)
    for _ in range(3000):  # a path too long to open
        os.mkdir("deeper", dir_fd=folder)
        below = os.open("deeper", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.mkdir("closed", 0o000, dir_fd=folder)
    os.close(folder)
    store.sweep()
    assert left_in_staging(store) == []
    assert kept.read_text() == "on the host"


async def test_a_scratch_directory_is_kept_while_it_is_used_and_then_removed(tmp_path: Path):
    store = Store(tmp_path)
    async with store.scratch("update") as work:
        (work / "file").write_text("x")
        store.sweep()
        assert (work / "file").exists()
    assert left_in_staging(store) == []
    abandoned = tmp_path / "staging" / "scratch-update.1"
    abandoned.mkdir()
    store.sweep()
    assert not abandoned.exists(), "its process was killed"


async def test_a_removed_entry_is_gone_and_can_be_made_again(tmp_path: Path):
    store = Store(tmp_path)
    first = await store.obtain("base", INPUTS, make_hello)
    assert await store.remove("base", first.key) == "removed"
    assert await store.remove("base", first.key) == "gone"
    assert store.entries() == []
    assert left_in_staging(store) == []
    second = await store.obtain("base", INPUTS, make_hello)
    assert second.key == first.key
    assert second.id != first.id, "what was made from the first must not be used with the second"


@pytest.mark.parametrize(("kind", "key"), [("..", "a"), ("base", "../../etc"), ("base", "")])
async def test_names_cannot_leave_the_store(tmp_path: Path, kind: str, key: str):
    with pytest.raises(ValueError, match="not a name"):
        await Store(tmp_path).remove(kind, key)


@pytest.mark.parametrize("content", ["hallo", "hell", None])
async def test_a_changed_or_missing_file_is_damage(tmp_path: Path, content: str | None):
    store = Store(tmp_path)
    entry = await store.obtain("base", INPUTS, make_hello)
    assert await store.damaged_files(entry) == []
    if content is None:
        (entry.path / "hello").unlink()
    else:
        (entry.path / "hello").write_text(content)
    assert await store.damaged_files(store.entry(entry.path)) == ["hello"]


async def test_a_cancelled_search_for_damage_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path)
    entry = await store.obtain("base", INPUTS, make_hello)
    read: list[bytes] = []

    def cancelled_by_the_first(chunk: bytes, _crc: int) -> int:
        read.append(chunk)
        anyio.from_thread.run_sync(scope.cancel)
        return 0

    monkeypatch.setattr("templates.store.CHUNK", 1)
    monkeypatch.setattr("templates.store.zlib.crc32", cancelled_by_the_first)
    with anyio.CancelScope() as scope:
        await store.damaged_files(entry)
    assert (read, scope.cancelled_caught) == ([b"h"], True)


# -- entries in use ----------------------------------------------------------------------------------------


async def test_a_held_entry_is_not_removed_until_it_is_released(tmp_path: Path):
    store = Store(tmp_path)
    path = (await store.obtain("base", INPUTS, make_hello)).path
    with hold([path]), hold([path]):
        assert is_held(path)
        assert await store.remove("base", path.name) == "in use"
        assert (path / "hello").read_text() == "hello"
    assert not is_held(path)
    assert await store.remove("base", path.name) == "removed"


async def test_a_removed_entry_cannot_be_held(tmp_path: Path):
    store = Store(tmp_path)
    path = (await store.obtain("base", INPUTS, make_hello)).path
    await store.remove("base", path.name)
    with pytest.raises(FileNotFoundError), hold([path]):
        pass


async def test_an_entry_that_is_being_removed_cannot_be_held(tmp_path: Path):
    path = (await Store(tmp_path).obtain("base", INPUTS, make_hello)).path
    with exclusive(path), pytest.raises(FileNotFoundError, match="being removed"), hold([path]):
        pass


async def test_failing_to_hold_one_of_several_entries_holds_none(tmp_path: Path):
    store = Store(tmp_path)
    path = (await store.obtain("base", INPUTS, make_hello)).path
    with pytest.raises(FileNotFoundError), hold([path, tmp_path / "nothing"]):
        pass
    assert not is_held(path)


def _hold_and_hang(path: Path, started: Any) -> None:
    with hold([path]):
        started.send("ready")
        signal.pause()


async def test_a_hold_counts_across_processes_and_ends_with_a_killed_one(tmp_path: Path):
    store = Store(tmp_path)
    path = (await store.obtain("base", INPUTS, make_hello)).path
    ready, started = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=_hold_and_hang, args=(path, started))
    holder.start()
    assert holder.pid
    assert await anyio.to_thread.run_sync(ready.poll, 30)
    assert await store.remove("base", path.name) == "in use"
    os.kill(holder.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(holder.join, 30)
    holder.close()
    assert await store.remove("base", path.name) == "removed"


async def test_the_stamp_changes_when_entries_are_made_or_removed_and_only_then(tmp_path: Path):
    store = Store(tmp_path)
    stamps = [store.stamp(["base", "image"])]
    path = (await store.obtain("base", INPUTS, make_hello)).path
    stamps.append(store.stamp(["base", "image"]))
    await store.obtain("other", INPUTS, make_hello)
    with hold([path]):
        await store.remove("base", path.name)
    assert store.stamp(["base", "image"]) == stamps[-1]
    await store.remove("base", path.name)
    stamps.append(store.stamp(["base", "image"]))
    assert len(set(stamps)) == 3


# -- locks and logs ----------------------------------------------------------------------------------------


def locks_and_logs(store: Store) -> set[str]:
    return {path.name for folder in ("locks", "logs") for path in store.home.glob(f"{folder}/*")}


def write_logs(store: Store, *keys: str) -> None:
    store.logs.mkdir(exist_ok=True)
    for key in keys:
        (store.logs / f"packages-{key}.log").write_text("output")
    (store.logs / "setup.log").write_text("of another command")


async def test_a_lock_file_is_removed_with_the_lock(tmp_path: Path):
    store = Store(tmp_path)

    async def fail(staging: Path) -> Mapping[str, Any]:
        assert locks_and_logs(store) == {f"base-{key_of(INPUTS)}"}
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.obtain("base", INPUTS, fail)
    await store.obtain("base", INPUTS, make_hello)
    await store.remove("base", key_of(INPUTS))
    assert locks_and_logs(store) == set()


async def test_an_entrys_logs_are_removed_with_it(tmp_path: Path):
    store, kept = Store(tmp_path), {"n": 2}
    for inputs in (INPUTS, kept):
        await store.obtain("base", inputs, make_hello)
    write_logs(store, key_of(INPUTS), key_of(kept))
    await store.remove("base", key_of(INPUTS))
    assert locks_and_logs(store) == {"setup.log", f"packages-{key_of(kept)}.log"}


async def test_tidying_removes_logs_of_failed_builds_and_locks_of_dead_processes(tmp_path: Path):
    store = Store(tmp_path)
    failed, kept, being_made = {"n": 1}, {"n": 2}, INPUTS
    await store.obtain("base", kept, make_hello)
    write_logs(store, key_of(failed), key_of(kept), key_of(being_made))
    (tmp_path / "locks" / f"base-{key_of(failed)}").write_text("")

    async def tidy(staging: Path) -> Mapping[str, Any]:
        store.tidy()
        assert staging.exists()
        expected = {f"packages-{key_of(inputs)}.log" for inputs in (kept, being_made)}
        assert locks_and_logs(store) == {"setup.log", f"base-{key_of(being_made)}", *expected}
        return {}

    await store.obtain("base", being_made, tidy)


async def test_a_lock_file_that_was_removed_before_it_was_locked_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next process would create and lock a new file, and both would hold "the" lock."""
    store = Store(tmp_path)
    lock = tmp_path / "locks" / f"base-{key_of(INPUTS)}"
    flock = fcntl.flock
    removed: list[Path] = []
    made: list[bool] = []

    def remove_then_lock(file: Any, operation: int) -> None:
        if not removed:
            lock.unlink()
            removed.append(lock)
        flock(file, operation)

    async def make(staging: Path) -> Mapping[str, Any]:
        made.append(lock.exists())
        return await make_hello(staging)

    monkeypatch.setattr("fcntl.flock", remove_then_lock)
    with anyio.fail_after(10):
        await store.obtain("base", INPUTS, make)
    assert (removed, made) == ([lock], [True])


def _count_up(home: Path, times: int) -> None:
    """Read, wait and write a number under the store's lock: a lost update shows that two held it at once."""

    async def main() -> None:
        for _ in range(times):
            await store.remove("base", key_of(INPUTS))
            async with store._locked("base", key_of(INPUTS)):
                value = int(counter.read_text())
                await anyio.sleep(0.001)
                counter.write_text(str(value + 1))

    store, counter = Store(home), home / "counter"
    contextvars.Context().run(anyio.run, main)  # the parent's context says that a loop runs


async def test_processes_that_lock_and_remove_the_same_lock_file_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "counter").write_text("0")
    monkeypatch.setattr("templates.store.LOCK_POLL_S", 0.001)
    workers = [FORK.Process(target=_count_up, args=(tmp_path, 30)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        await anyio.to_thread.run_sync(worker.join, 60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "counter").read_text() == "90"
    assert locks_and_logs(Store(tmp_path)) == set()
