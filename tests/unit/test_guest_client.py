"""The client against agents that are hostile, slow, broken or gone."""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guest.client.messages import Artifact, Chart, Display, Finished, Identity, Output, RunCode, Series
from guest.client.parsing import parse_display, parse_listing
from guest.errors import AgentGone, AgentTimeout, GuestError, ProtocolError, RequestRefused, first_error
from guest.protocol import MAGIC, MAX_BODY, MAX_LISTING, PREFIX, PROTOCOL_VERSION, Frame, encode, encode_json
from guest.stdin import WINDOW
from tests.unit.json_values import JSON
from tests.unit.scripted_agent import DONE, TIMEOUT_S, FakeAgent, collect, connected, forever


async def test_a_wrong_protocol_version_asks_for_a_rebuild():
    async def script(agent: FakeAgent) -> None:
        await agent.greet(version=7)
        await anyio.sleep_forever()

    with pytest.raises(ProtocolError, match=f"protocol 7, this host {PROTOCOL_VERSION}; rebuild"):
        async with connected(script, greet=False):
            pass


async def test_a_greeting_with_another_nonce_is_refused():
    async def script(agent: FakeAgent) -> None:
        await agent.greet(nonce="stale")
        await anyio.sleep_forever()

    with pytest.raises(ProtocolError, match="not the answer to ours"):
        async with connected(script, greet=False):
            pass


async def test_leftovers_of_an_earlier_conversation_are_skipped():
    async def script(agent: FakeAgent) -> None:
        await agent.pipe.send(b"half a frame" + encode({"id": 3, "ok": True}))
        await agent.greet()
        await anyio.sleep_forever()

    async with connected(script, greet=False, seeking=True) as client:
        assert client.hello.language == "python"
    with pytest.raises(ProtocolError):  # a pipe or a socket has none
        async with connected(script, greet=False):
            pass


async def test_an_agent_that_never_greets_is_a_timeout():
    with pytest.raises(AgentTimeout):
        async with connected(forever, greet=False, timeout_s=0.05):
            pass


async def test_an_unanswered_request_is_a_timeout_and_the_client_stays_usable():
    async def script(agent: FakeAgent) -> None:
        first = await agent.expect("write")
        second = await agent.expect("ping")
        await agent.reply(first, {"ok": True, "file": {}})  # late: the request has timed out
        await agent.reply(second, {"ok": True})
        await anyio.sleep_forever()

    async with connected(script, timeout_s=0.2) as client:
        with pytest.raises(AgentTimeout):
            await client.write("x", b"")
        await client.ping()


async def test_a_cancelled_request_leaves_the_client_usable():
    asked = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        first = await agent.expect("list")
        asked.set()
        second = await agent.expect("ping")
        await agent.reply(first, {"ok": True})
        await agent.reply(second, {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        await give_up(client.list("/", recursive=False, max_entries=1), asked)
        await client.ping()


async def test_wait_failed_returns_when_the_agent_is_gone():
    leave = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        await leave.wait()
        await agent.pipe.aclose()

    async with connected(script) as client:
        assert client.failure is None
        leave.set()
        with anyio.fail_after(TIMEOUT_S):
            await client.wait_failed()
        assert isinstance(client.failure, AgentGone)


async def test_a_lost_machine_fails_all_requests_with_agent_gone():
    async def script(agent: FakeAgent) -> None:
        await agent.expect("run")
        await agent.expect("write")
        await agent.pipe.aclose()

    async with connected(script) as client, client.run(RunCode("1")) as run:
        with pytest.raises(AgentGone):
            await client.write("x", b"")
        with pytest.raises(AgentGone):
            await run.wait_finished()
        with pytest.raises(AgentGone):
            await client.write("y", b"")


async def test_a_refusal_fails_only_its_own_request():
    async def script(agent: FakeAgent) -> None:
        number = await agent.expect("write")
        await agent.reply(number, {"ok": False, "error": {"code": "not_found", "message": "no such file"}})
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(RequestRefused, match="no such file") as caught:
            await client.write("x", b"")
        assert caught.value.code == "not_found"
        await client.ping()


ATTACKS: dict[str, Callable[[int], bytes]] = {
    "giant length": lambda _: PREFIX.pack(MAGIC, 2**31, 2**31),
    "garbage": lambda _: b"\x00" * 100,
    "invalid UTF-8": lambda _: PREFIX.pack(MAGIC, 2, 0) + b"\xff\xff",
    "deep nesting": lambda _: PREFIX.pack(MAGIC, 60_000, 0) + b"[" * 60_000,
    "negative id": lambda _: encode({"id": -1, "ok": True}),
    "unknown id": lambda number: encode({"id": number + 1000, "ok": True}),
    "no id": lambda _: encode({"ok": True}),
    "boolean id": lambda _: encode({"id": True, "ok": True}),
    "text id": lambda number: encode({"id": str(number), "ok": True}),
    "neither event nor answer": lambda number: encode({"id": number}),
    "an event for a plain request": lambda number: encode({"id": number, "event": "output"}),
    "ok that is no boolean": lambda number: encode({"id": number, "ok": 1}),
    "refusal without error": lambda number: encode({"id": number, "ok": False}),
    "refusal with wrong error": lambda number: encode({"id": number, "ok": False, "error": {"code": 1}}),
    "answer without fields": lambda number: encode({"id": number, "ok": True}),
    "answer with wrong types": lambda number: encode({"id": number, "ok": True, "file": {"path": 1, "kind": []}}),
    "negative size": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": -1, "mtime": 0}}
    ),
    "a boolean as size": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": True, "mtime": 0}}
    ),
    "a boolean as time": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": 1, "mtime": True}}
    ),
    "a time beyond all calendars": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": 1, "mtime": 1e18}}
    ),
    "text as size": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": "1", "mtime": 0}}
    ),
    "a size of 64 bits": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "file", "size": 2**63, "mtime": 0}}
    ),
    "unknown kind": lambda number: encode(
        {"id": number, "ok": True, "file": {"path": "a", "kind": "disk", "size": 1, "mtime": 0}}
    ),
}


async def test_half_a_surrogate_pair_in_a_name_is_replaced():
    async def script(agent: FakeAgent) -> None:
        entry = {"path": "/workspace/\udcff", "kind": "file", "size": 1, "mtime": 0}
        await agent.reply(await agent.expect("write"), {"ok": True, "file": entry})
        await anyio.sleep_forever()

    async with connected(script) as client:
        assert (await client.write("x", b"")).path == "/workspace/?"


async def test_a_long_refusal_is_cut():
    async def script(agent: FakeAgent) -> None:
        error = {"code": "x" * 1000, "message": "x" * 60_000}
        await agent.reply(await agent.expect("write"), {"ok": False, "error": error})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.write("x", b"")
        assert (len(caught.value.code), len(caught.value.message)) == (40, 4000)


async def test_an_error_quotes_little_of_what_the_agent_sent():
    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("run"), {**DONE, "status": "x" * 50_000})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError) as caught:
            await collect(client, RunCode("1"))
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_is_a_protocol_error_and_fails_all_later_requests(attack):
    async def script(agent: FakeAgent) -> None:
        await agent.pipe.send(ATTACKS[attack](await agent.expect("write")))
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await client.write("x", b"")
        with pytest.raises(ProtocolError):
            await client.ping()


async def test_more_of_a_file_than_was_asked_for_is_an_attack():
    async def script(agent: FakeAgent) -> None:
        number = await agent.expect("read")
        await agent.reply(number, {"ok": True, "size": 5, "eof": True}, b"12345")
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await client.read("x", limit=4)


async def test_a_longer_listing_than_was_asked_for_is_an_attack():
    entry = {"path": "a", "kind": "file", "size": 1, "mtime": 0.0}

    async def script(agent: FakeAgent) -> None:
        number = await agent.expect("list")
        await agent.reply(number, {"ok": True, "truncated": False}, json.dumps([entry] * 3).encode())
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await client.list("x", recursive=False, max_entries=2)


async def test_a_run_yields_its_events_in_order_and_ends_with_finished():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "output", "stream": "stdout"}, "grün".encode()[:3])
        await agent.reply(run, {"event": "display", "files": ["/tmp/outputs/a.png"]}, b'{"text/plain": "5"}')
        await agent.reply(run, {"event": "output", "stream": "stdout"}, "grün".encode()[3:])
        await agent.reply(run, {"event": "artifact", "path": "/tmp/outputs/a.png", "size": 3})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        events = await collect(client, RunCode("1"))
    assert events[:-1] == [
        Output("stdout", "gr"),
        Display({"text/plain": "5"}, ("/tmp/outputs/a.png",)),
        Output("stdout", "ün"),
        Artifact("/tmp/outputs/a.png", 3),
    ]
    assert isinstance(events[-1], Finished)


async def test_no_character_is_split_by_a_gap():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "output", "stream": "stderr"}, "aü".encode()[:-1])
        await agent.reply(run, {"event": "output", "stream": "stderr", "gap": 10}, "€b".encode()[1:])
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        events = await collect(client, RunCode("1"))
    assert events[:-1] == [Output("stderr", "a"), Output("stderr", "\ufffdb", 10)]


RUN_ATTACKS: dict[str, dict[str, Any]] = {
    "unknown event": {"event": "explode"},
    "unknown stream": {"event": "output", "stream": "stdin"},
    "negative gap": {"event": "output", "stream": "stdout", "gap": -5},
    "artifact without a path": {"event": "artifact", "size": 1},
    "files that are no list": {"event": "display", "files": "abc"},
    "too many files": {"event": "display", "files": ["a"] * 65},
    "files that are no text": {"event": "display", "files": [1]},
    "a stream that is no text": {"event": "output", "stream": ["stdout"]},
    "a boolean as gap": {"event": "output", "stream": "stdout", "gap": True},
    "a gap of 64 bits": {"event": "output", "stream": "stdout", "gap": 2**63},
    "huge exit code": {**DONE, "exit_code": 2**32},
    "error without a message": {**DONE, "error": {"name": "x"}},
    "text as a flag": {**DONE, "artifacts_complete": "yes"},
    "unknown status": {**DONE, "status": "great"},
    "unknown state": {**DONE, "state": None},
    "no output totals": {**DONE, "output": None},
    "text as exit code": {**DONE, "exit_code": "0"},
    "error that is no object": {**DONE, "error": "boom"},
    "a signal of two lines": {**DONE, "signal": "SIGKILL\n[ok]"},
    "a signal that is a sentence": {**DONE, "signal": "SIGKILL or so"},
    "a window for input that is not open": {"event": "window", "bytes": 1},
}


@pytest.mark.parametrize("attack", RUN_ATTACKS)
async def test_an_attack_on_a_run_is_a_protocol_error(attack):
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, RUN_ATTACKS[attack], b"{}")
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await collect(client, RunCode("1"))


@pytest.mark.parametrize("size", [0, -1, True, "1", None, WINDOW + 1])
async def test_a_window_for_input_is_a_number_within_its_limit(size):
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "window", "bytes": size})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await collect(client, RunCode("1", stdin_open=True))


async def test_input_waits_for_the_window_and_ends_with_the_run():
    parts: list[bytes] = []

    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        for size in (5, 2):
            await agent.reply(run, {"event": "window", "bytes": size})
            frame = await agent.next()
            parts.append(frame.body)
            await agent.reply(frame.header["id"], {"ok": True})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client, client.run(RunCode("1", stdin_open=True)) as run:
        assert [await run.write(b"0123456789"), await run.write(b"56789"), await run.write(b"789")] == [5, 2, 0]
        await run.close_stdin()
    assert parts == [b"01234", b"56"]


async def test_input_and_its_end_that_were_refused_can_be_sent_again():
    taken: list[tuple[bytes, bool]] = []

    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "window", "bytes": 5})
        for refused in (True, False, True, False):
            frame = await agent.next()
            if refused:
                await agent.reply(frame.header["id"], {"ok": False, "error": {"code": "busy", "message": "not now"}})
            else:
                taken.append((frame.body, frame.header["end"]))
                await agent.reply(frame.header["id"], {"ok": True})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client, client.run(RunCode("1", stdin_open=True)) as run:
        with pytest.raises(RequestRefused, match="not now"):
            await run.write(b"01234")
        assert await run.write(b"01234") == 5
        with pytest.raises(RequestRefused, match="not now"):
            await run.close_stdin()
        await run.close_stdin()
        assert not run.stdin_open
        assert [event async for event in run]  # to its end
    assert taken == [(b"01234", False), (b"", True)]


async def test_the_end_of_input_is_sent_though_the_caller_has_left():
    asked, left = anyio.Event(), anyio.Event()

    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        end = await agent.expect("stdin")
        asked.set()
        await left.wait()
        await agent.reply(end, {"ok": True})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client, client.run(RunCode("1", stdin_open=True)) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.close_stdin)
            await asked.wait()
            tasks.cancel_scope.cancel()
            left.set()
        assert not run.stdin_open


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"event": "output", "stream": "stdout"}, b"x" * 50_000),
        ({"event": "output", "stream": "stdout"}, b""),
        ({"event": "display"}, b'{"text/plain": "' + b"x" * 50_000 + b'"}'),
        ({"event": "display"}, b"{}"),
        ({"event": "artifact", "path": "/tmp/outputs/a", "size": 1}, b""),
    ],
)
async def test_endless_events_end_in_a_protocol_error(header, body):
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        while True:
            await agent.reply(run, header, body)

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            async with client.run(RunCode("1", head_bytes=1000, tail_bytes=1000, max_display_bytes=1000)):
                await client.write("never answered", b"")


async def give_up(request: Awaitable[object], asked: anyio.Event) -> None:
    """Cancel a request after the agent has received it."""
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            await request

        tasks.start_soon(ask)
        await asked.wait()
        tasks.cancel_scope.cancel()


async def test_late_answers_never_add_up_to_an_attack():
    asked = [anyio.Event() for _ in range(20)]  # a megabyte each

    async def script(agent: FakeAgent) -> None:
        for each in asked:
            late = await agent.expect("read")
            each.set()
            number = await agent.expect("ping")
            await agent.reply(late, {"ok": True, "size": MAX_BODY, "eof": True}, b"x" * MAX_BODY)
            await agent.reply(number, {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        for each in asked:
            await give_up(client.read("x", limit=MAX_BODY), each)
            await client.ping()


async def test_a_cancelled_request_may_be_answered_only_once():
    asked = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        late = await agent.expect("list")
        asked.set()
        for op in ("ping", "write"):
            number = await agent.expect(op)
            await agent.reply(late, {"ok": True})
            await agent.reply(number, {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        await give_up(client.list("/", recursive=False, max_entries=1), asked)
        await client.ping()
        with pytest.raises(ProtocolError, match="request that has ended"):
            await client.write("x", b"")


async def test_events_after_the_end_of_a_run_are_an_attack():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, DONE)
        await agent.expect("write")
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        await collect(client, RunCode("1"))
        with pytest.raises(ProtocolError, match="request that has ended"):
            await client.write("x", b"")


async def test_a_run_cancelled_before_it_was_sent_leaves_the_client_usable(monkeypatch):
    monkeypatch.setattr("guest.client.client.KILL_MARGIN_S", 0.05)

    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        async with anyio.create_task_group() as tasks, client._channel._sending:  # another frame is being sent
            tasks.start_soon(collect, client, RunCode("1", grace_s=0.0))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await client.ping()


@pytest.mark.parametrize("answer", [{}, {"file": {"path": "a", "kind": "file", "size": 1, "mtime": 0.0}}])
async def test_a_write_is_confirmed_with_its_last_part_and_only_then(answer):
    async def script(agent: FakeAgent) -> None:
        while True:
            await agent.reply(await agent.expect("write"), {"ok": True, **answer})

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await client.write("x", b"x" * (1 if not answer else MAX_BODY + 1))


async def test_a_file_sent_byte_by_byte_is_an_attack():
    async def script(agent: FakeAgent) -> None:
        while True:
            await agent.reply(await agent.expect("read"), {"ok": True, "size": 10**9, "eof": False}, b"x")

    async with connected(script) as client:
        with pytest.raises(ProtocolError, match="less of a file"):
            await client.read("x", limit=100)


async def test_a_bug_in_the_reader_fails_the_client_and_is_reported(monkeypatch):
    def fault(*_: object) -> None:
        raise RecursionError("ours")

    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        monkeypatch.setattr(client._channel, "_dispatch", fault)
        with pytest.raises(ProtocolError, match="ours"):
            await client.ping()


def test_the_first_error_of_a_group_has_the_others_as_notes():
    first, second = ValueError("first"), KeyError("second")
    group = BaseExceptionGroup("all", [BaseExceptionGroup("inner", [first]), second, first])
    assert first_error(group) is first
    assert first.__notes__ == ["KeyError('second') was raised as well"]
    assert first_error(second) is second
    assert not hasattr(second, "__notes__")


async def test_displays_without_text_do_not_count_against_the_display_limit():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        for number in range(200):
            await agent.reply(run, {"event": "display", "files": [f"/tmp/outputs/figure-{number}.png"]}, b"{}")
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        events = await collect(client, RunCode("1", max_display_bytes=1))
    assert len(events) == 201


@pytest.mark.parametrize("body", [b"{}", b" " * 40_000 + b"{}"])
async def test_the_number_of_displays_without_text_is_limited(body):
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        while True:
            await agent.reply(run, {"event": "display", "files": ["/tmp/outputs/figure-1.png"]}, body)

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await collect(client, RunCode("1", max_display_bytes=1))


@pytest.mark.parametrize(
    "header",
    [
        {"event": "display", "files": ["x" * 60_000]},
        {"event": "artifact", "path": "/tmp/outputs/" + "x" * 60_000, "size": 1},
    ],
)
async def test_paths_in_unread_events_count_against_the_queue_limit(header):
    sent = 0

    async def script(agent: FakeAgent) -> None:
        nonlocal sent
        run = await agent.expect("run")
        while True:
            await agent.reply(run, header, b"{}")
            sent += 1

    async with connected(script) as client, client.run(RunCode("1")):
        with pytest.raises(ProtocolError):
            await client.write("never answered", b"")
    assert sent < 1000


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b'{"text/plain": 1}', b"[" * 50_000, b"\xff"])
async def test_invalid_display_data_of_the_code_is_dropped(body):
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(run, {"event": "display", "files": ["/tmp/outputs/a.png"]}, body)
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client:
        events = await collect(client, RunCode("1"))
    assert events[0] == Display({}, ("/tmp/outputs/a.png",))


async def test_unread_events_of_a_run_do_not_block_other_requests():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        for _ in range(200):
            await agent.reply(run, {"event": "output", "stream": "stdout"}, b"x" * 100)
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await agent.reply(run, DONE)
        await anyio.sleep_forever()

    async with connected(script) as client, client.run(RunCode("1")) as run:
        await client.ping()
        texts = [event.text async for event in run if isinstance(event, Output)]
        assert len("".join(texts)) == 20_000


async def test_leaving_a_run_stops_it():
    async def script(agent: FakeAgent) -> None:
        run = await agent.expect("run")
        await agent.reply(await agent.expect("stop"), {"ok": True})
        await agent.reply(run, {**DONE, "status": "interrupted"})
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        async with client.run(RunCode("1")) as run:
            pass
        assert run.finished is not None
        assert run.finished.status == "interrupted"
        await client.ping()


async def test_a_run_that_cannot_be_stopped_breaks_the_client(monkeypatch):
    monkeypatch.setattr("guest.client.client.KILL_MARGIN_S", 0.05)

    async def script(agent: FakeAgent) -> None:
        await agent.expect("run")
        await agent.reply(await agent.expect("stop"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        async with client.run(RunCode("1", grace_s=0.0)):
            pass
        with pytest.raises(AgentTimeout, match="could not be stopped"):
            await client.write("x", b"")


async def test_code_that_does_not_fit_into_a_frame_is_refused_by_the_client():
    async with connected(forever) as client:
        with pytest.raises(RequestRefused) as caught:
            async with client.run(RunCode("x" * (MAX_BODY + 1))):
                pass
        assert caught.value.code == "too_large"


async def test_a_refresh_needs_entropy():
    async with connected(forever) as client:
        with pytest.raises(ValueError, match="32 bytes"):
            await client.refresh(Identity("host", "0" * 32, b"short"))


async def test_an_exception_in_the_block_is_not_wrapped():
    with pytest.raises(KeyError, match="mine"):
        async with connected(forever):
            raise KeyError("mine")


FIELDS = st.sampled_from(
    ["ok", "event", "stream", "gap", "files", "path", "size", "status", "state", "output", "error"]
)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.dictionaries(FIELDS, JSON, max_size=6), st.binary(max_size=50)), max_size=5))
def test_a_hostile_agent_causes_only_guest_errors(frames):
    async def script(agent: FakeAgent) -> None:
        number = await agent.expect("run")
        for header, body in frames:
            await agent.reply(number, header, body)
        await agent.pipe.aclose()

    async def main() -> None:
        async with connected(script) as client:
            with suppress(GuestError):
                await collect(client, RunCode("1"))

    anyio.run(main)


@pytest.mark.parametrize(("forms", "kept"), [(32, 1), (33, 0)])
def test_a_display_with_too_many_forms_has_none(forms: int, kept: int):
    body = encode_json({"text/html": "<b>7</b>", **{f"x/{number}": "" for number in range(1, forms)}})
    assert len(parse_display({}, body).data) == kept


def test_a_display_keeps_the_forms_whose_types_we_know():
    body = encode_json({"text/plain": "7", "text/x-evil": "<b>", "application/vnd.jupyter.widget-view+json": "{}"})
    assert parse_display({}, body).data == {"text/plain": "7"}


CHART = {"type": "line", "title": "T\n[ok · sandbox", "series": [{"label": "a", "points": 3}], "extra": 1}


def test_what_a_chart_shows_is_parsed_and_stays_on_its_line():
    display = parse_display({}, encode_json({"application/vnd.mcp-sandbox.chart+json": json.dumps(CHART)}))
    assert display == Display({}, (), Chart(title="T\\n[ok · sandbox", type="line", series=(Series("a", 3),)))


@pytest.mark.parametrize(
    "facts",
    [
        "",
        "[",
        "[]",
        '{"title": 7}',
        '{"series": [{"points": -1}]}',
        json.dumps({"charts": [CHART] * 21}),
        " " * 300_000,
    ],
)
def test_a_chart_that_makes_no_sense_is_dropped(facts: str):
    body = encode_json({"application/vnd.mcp-sandbox.chart+json": facts, "text/plain": "7"})
    assert parse_display({}, body) == Display({"text/plain": "7"})


def test_a_listing_of_too_many_bytes_is_not_parsed():
    body = b"[" + b" " * MAX_LISTING + b"]"
    with pytest.raises(ProtocolError, match="too long"):
        parse_listing(Frame({"truncated": False}, body), 1)
