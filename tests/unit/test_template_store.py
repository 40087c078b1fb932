"""The store: whole things or nothing, made once, however many want them."""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

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
