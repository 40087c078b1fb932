"""The store: whole things or nothing, made once, however many want them."""

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from templates.holding import alone, held, is_held
from templates.store import Store, key_of

INPUTS = {"suite": "bookworm", "packages": ["a", "b"]}
pytestmark = pytest.mark.anyio


async def make_hello(staging: Path) -> Mapping[str, Any]:
    (staging / "hello").write_text("hello")
    return {"version": "1"}


def left_in_staging(store: Store) -> list[Path]:
    return list(store.home.glob("staging/*"))


def test_a_key_depends_on_values_and_not_on_their_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})


async def test_a_thing_is_made_once_and_found_afterwards(tmp_path: Path):
    store = Store(tmp_path)
    assert store.get("base", INPUTS) is None
    path = await store.obtain("base", INPUTS, make_hello)

    async def make_again(_staging: Path) -> Mapping[str, Any]:
        raise AssertionError("it is there already")

    assert await store.obtain("base", INPUTS, make_again) == path == store.get("base", INPUTS)
    assert (path / "hello").read_text() == "hello"
    assert left_in_staging(store) == []


async def test_an_entry_says_what_it_was_made_from_and_how_big_it_is(tmp_path: Path):
    store = Store(tmp_path)
    path = await store.obtain("base", INPUTS, make_hello)
    (entry,) = store.entries()
    assert entry == store.entry(path)
    assert (entry.kind, entry.key, entry.inputs) == ("base", key_of(INPUTS), INPUTS)
    assert entry.details == {"version": "1"}
    assert entry.size_bytes > 0


async def test_an_entry_may_be_a_tree_of_anything_and_each_file_in_it_counts_once(tmp_path: Path):
    store = Store(tmp_path)

    async def make_tree(staging: Path) -> Mapping[str, Any]:
        deep = staging / "root/a/b"
        deep.mkdir(parents=True)
        (deep / "file").write_bytes(b"x" * 1_000_000)
        (deep / "again").hardlink_to(deep / "file")
        (deep / "up").symlink_to("../..")
        (deep / "nowhere").symlink_to("/nonexistent/path")
        os.mkfifo(deep / "pipe")  # opening one would wait for ever
        return {}

    with anyio.fail_after(30):
        path = await store.obtain("tree", INPUTS, make_tree)
    assert (path / "root/a/b/up").readlink() == Path("../..")
    assert 1_000_000 <= store.entry(path).size_bytes < 1_500_000
    assert [entry.kind for entry in store.entries()] == ["tree"]
    assert await store.remove("tree", key_of(INPUTS)) == "removed"
    assert left_in_staging(store) == []


async def test_a_failed_making_leaves_nothing(tmp_path: Path):
    store = Store(tmp_path)

    async def fail(staging: Path) -> Mapping[str, Any]:
        await make_hello(staging)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.obtain("base", INPUTS, fail)
    assert store.get("base", INPUTS) is None
    assert left_in_staging(store) == []
    await store.obtain("base", INPUTS, make_hello)


async def test_a_cancelled_making_leaves_nothing(tmp_path: Path):
    store = Store(tmp_path)
    async with anyio.create_task_group() as tasks:

        async def cancel_midway(staging: Path) -> Mapping[str, Any]:
            await make_hello(staging)
            tasks.cancel_scope.cancel()
            await anyio.sleep_forever()
            return {}

        await store.obtain("base", INPUTS, cancel_midway)
    assert store.get("base", INPUTS) is None
    assert left_in_staging(store) == []


async def test_two_who_want_the_same_thing_make_it_once(tmp_path: Path):
    made = []
    entered, go_on = anyio.Event(), anyio.Event()

    async def make(staging: Path) -> Mapping[str, Any]:
        made.append(staging)
        entered.set()
        await go_on.wait()
        return await make_hello(staging)

    found: list[Path] = []

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


def _make_and_hang(home: Path, ready: Any) -> None:
    async def hang(staging: Path) -> Mapping[str, Any]:
        await make_hello(staging)
        ready.set()
        await anyio.sleep_forever()
        return {}

    anyio.run(Store(home).obtain, "base", INPUTS, hang)


async def test_what_a_killed_maker_left_is_removed_and_never_used(tmp_path: Path):
    store = Store(tmp_path)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    maker = context.Process(target=_make_and_hang, args=(tmp_path, ready))
    maker.start()
    assert maker.pid
    assert await anyio.to_thread.run_sync(ready.wait, 30)
    assert len(left_in_staging(store)) == 1
    store.sweep()
    assert len(left_in_staging(store)) == 1, "its maker is alive"
    os.kill(maker.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(maker.join, 30)
    maker.close()

    assert store.get("base", INPUTS) is None
    store.sweep()
    assert left_in_staging(store) == []
    with anyio.fail_after(10):
        assert await store.obtain("base", INPUTS, make_hello)


async def test_what_a_maker_left_goes_however_deep_and_closed_it_is_and_nothing_that_it_leads_to(tmp_path: Path):
    store, kept = Store(tmp_path / "home"), tmp_path / "kept"
    kept.write_text("of the host")
    left = store.home / "staging" / "image-0123.left"
    left.mkdir(parents=True)
    (left / "link").symlink_to(tmp_path)
    folder = os.open(left, os.O_RDONLY)
    for _ in range(3000):  # its path is longer than any that can be opened
        os.mkdir("deeper", dir_fd=folder)
        below = os.open("deeper", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.mkdir("closed", 0o000, dir_fd=folder)
    os.close(folder)
    store.sweep()
    assert left_in_staging(store) == []
    assert kept.read_text() == "of the host"


async def test_a_removed_thing_is_gone_and_can_be_made_again(tmp_path: Path):
    store = Store(tmp_path)
    first = store.entry(await store.obtain("base", INPUTS, make_hello))
    assert await store.remove("base", first.key) == "removed"
    assert await store.remove("base", first.key) == "gone"
    assert store.entries() == []
    assert left_in_staging(store) == []
    second = store.entry(await store.obtain("base", INPUTS, make_hello))
    assert second.key == first.key
    assert second.id != first.id, "what depends on the first making must not be used with the second"


@pytest.mark.parametrize(("kind", "key"), [("..", "a"), ("base", "../../etc"), ("base", "")])
async def test_names_cannot_lead_out_of_the_store(tmp_path: Path, kind: str, key: str):
    with pytest.raises(ValueError, match="not a name"):
        await Store(tmp_path).remove(kind, key)


# -- things in use -----------------------------------------------------------------------------------------


async def test_what_somebody_holds_is_not_removed_until_nobody_does(tmp_path: Path):
    store = Store(tmp_path)
    path = await store.obtain("base", INPUTS, make_hello)
    with held([path]), held([path]):
        assert is_held(path)
        assert await store.remove("base", path.name) == "in use"
        assert (path / "hello").read_text() == "hello"
    assert not is_held(path)
    assert await store.remove("base", path.name) == "removed"


async def test_what_is_gone_cannot_be_held(tmp_path: Path):
    store = Store(tmp_path)
    path = await store.obtain("base", INPUTS, make_hello)
    await store.remove("base", path.name)
    with pytest.raises(FileNotFoundError), held([path]):
        pass


async def test_what_is_being_removed_cannot_be_held(tmp_path: Path):
    path = await Store(tmp_path).obtain("base", INPUTS, make_hello)
    with alone(path), pytest.raises(FileNotFoundError, match="being removed"), held([path]):
        pass


async def test_who_fails_to_hold_one_of_several_holds_none(tmp_path: Path):
    store = Store(tmp_path)
    path = await store.obtain("base", INPUTS, make_hello)
    with pytest.raises(FileNotFoundError), held([path, tmp_path / "nothing"]):
        pass
    assert not is_held(path)


def _hold_and_hang(path: Path, ready: Any) -> None:
    with held([path]):
        ready.set()
        signal.pause()


async def test_other_processes_are_heeded_and_a_killed_one_holds_nothing(tmp_path: Path):
    store = Store(tmp_path)
    path = await store.obtain("base", INPUTS, make_hello)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold_and_hang, args=(path, ready))
    holder.start()
    assert holder.pid
    assert await anyio.to_thread.run_sync(ready.wait, 30)
    assert await store.remove("base", path.name) == "in use"
    os.kill(holder.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(holder.join, 30)
    holder.close()
    assert await store.remove("base", path.name) == "removed"


async def test_a_making_and_a_removal_change_the_stamp_and_nothing_else_does(tmp_path: Path):
    store = Store(tmp_path)
    stamps = [store.stamp(["base", "image"])]
    path = await store.obtain("base", INPUTS, make_hello)
    stamps.append(store.stamp(["base", "image"]))
    await store.obtain("other", INPUTS, make_hello)
    with held([path]):
        await store.remove("base", path.name)
    assert store.stamp(["base", "image"]) == stamps[-1]
    await store.remove("base", path.name)
    stamps.append(store.stamp(["base", "image"]))
    assert len(set(stamps)) == 3


async def test_tidying_leaves_logs_and_locks_of_what_is_there_or_being_made(tmp_path: Path):
    store = Store(tmp_path)
    store.logs.mkdir()
    gone, kept = {"n": 1}, {"n": 2}
    making = key_of(INPUTS)
    for inputs in (gone, kept):
        await store.obtain("base", inputs, make_hello)
    for key in (key_of(gone), key_of(kept), making):
        (store.logs / f"packages-{key}.log").write_text("said")
    (store.logs / "setup.log").write_text("of something else")
    await store.remove("base", key_of(gone))

    async def tidy(staging: Path) -> Mapping[str, Any]:
        store.tidy()
        assert staging.exists()
        assert {path.name for path in store.logs.iterdir()} == {
            "setup.log",
            f"packages-{key_of(kept)}.log",
            f"packages-{making}.log",
        }
        assert {path.name for path in store.home.glob("locks/*")} == {f"base-{key_of(kept)}", f"base-{making}"}
        return {}

    await store.obtain("base", INPUTS, tidy)


async def test_a_lock_that_was_removed_before_it_was_taken_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever comes next would lock another file of that name, and there would be two of them."""
    store = Store(tmp_path)
    lock = tmp_path / "locks" / f"base-{key_of(INPUTS)}"
    flock = fcntl.flock
    removed: list[Path] = []
    made: list[bool] = []

    def remove_then_lock(file: Any, how: int) -> None:
        if not removed:
            lock.unlink()
            removed.append(lock)
        flock(file, how)

    async def make(staging: Path) -> Mapping[str, Any]:
        made.append(lock.exists())
        return await make_hello(staging)

    monkeypatch.setattr("fcntl.flock", remove_then_lock)
    with anyio.fail_after(10):
        await store.obtain("base", INPUTS, make)
    assert (removed, made) == ([lock], [True])
