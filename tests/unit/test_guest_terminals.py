"""A terminal as the host sees it: windows both ways, and hostile agents."""

from typing import Any

import anyio
import pytest

from guest.client import AgentClient
from guest.client.terminals import ShellEnd, Size
from guest.errors import AgentGone, ProtocolError, RequestRefused
from guest.terminals import CHUNK, INPUT_WINDOW, OUTPUT_WINDOW
from tests.unit.scripted_agent import FakeAgent, connected

SIZE = Size(80, 24)
OPENED: dict[str, Any] = {"event": "window", "bytes": INPUT_WINDOW}
EXITED: dict[str, Any] = {"ok": True, "exit_code": 3, "signal": None}


async def acknowledge(agent: FakeAgent, op: str) -> dict[str, Any]:
    """Answer a request about a terminal, and return it with its body."""
    header, body = await agent.next()
    assert header["op"] == op
    await agent.reply(header["id"], {"ok": True})
    return {**header, "body": body}


async def test_a_terminal_carries_bytes_both_ways_and_ends_with_the_shells_exit_code():
    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, OPENED)
        typed = await acknowledge(agent, "terminal_input")
        assert (typed["terminal"], typed["body"]) == (terminal, b"ls\r")
        resized = await acknowledge(agent, "terminal_resize")
        assert (resized["columns"], resized["rows"]) == (100, 30)
        await agent.reply(terminal, {"event": "output"}, b"a file\r\n")
        await agent.reply(terminal, EXITED)
        await anyio.sleep_forever()

    async with connected(script) as client, client.terminal(SIZE, "xterm") as terminal:
        await terminal.send(b"ls\r")
        await terminal.resize(Size(100, 30))
        assert await terminal.receive() == b"a file\r\n"
        assert await terminal.receive() == b""
        assert terminal.end == ShellEnd(3, None)


async def test_leaving_a_terminal_hangs_up_and_waits_until_its_shell_has_ended():
    ended = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, OPENED)
        await acknowledge(agent, "terminal_close")
        ended.set()
        await agent.reply(terminal, {"ok": True, "exit_code": None, "signal": "SIGHUP"})
        await acknowledge(agent, "ping")
        await anyio.sleep_forever()

    async with connected(script) as client:
        async with client.terminal(SIZE, "xterm") as terminal:
            pass
        assert ended.is_set()
        assert terminal.end == ShellEnd(None, "SIGHUP")
        await client.ping()


async def test_a_terminal_gives_the_machine_a_window_only_for_what_was_used():
    given: list[int] = []

    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, OPENED)
        for _ in range(OUTPUT_WINDOW // CHUNK):
            await agent.reply(terminal, {"event": "output"}, bytes(CHUNK))
        given.append((await acknowledge(agent, "terminal_window"))["bytes"])
        await agent.reply(terminal, {"event": "output"}, bytes(given[0]))
        given.extend([(await acknowledge(agent, "terminal_window"))["bytes"] for _ in range(2)])
        await agent.reply(terminal, EXITED)
        await anyio.sleep_forever()

    async with connected(script) as client, client.terminal(SIZE, "xterm") as terminal:
        received = 0
        while data := await terminal.receive():
            received += len(data)
    assert (given, received) == ([OUTPUT_WINDOW // 2] * 3, OUTPUT_WINDOW * 3 // 2)


async def test_input_waits_until_the_machine_has_room_for_it():
    taken = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, {"event": "window", "bytes": 2})
        assert (await acknowledge(agent, "terminal_input"))["body"] == b"ab"
        await agent.reply(terminal, {"event": "window", "bytes": 10})
        assert (await acknowledge(agent, "terminal_input"))["body"] == b"cd"
        taken.set()
        await agent.reply(terminal, EXITED)
        await anyio.sleep_forever()

    async with connected(script) as client, client.terminal(SIZE, "xterm") as terminal:
        await terminal.send(b"abcd")
        assert taken.is_set()
        assert await terminal.receive() == b""  # it has ended


async def test_a_terminal_that_the_agent_refuses_fails_alone():
    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, {"ok": False, "error": {"code": "busy", "message": "too many"}})
        await acknowledge(agent, "ping")
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(RequestRefused, match="too many"):
            async with client.terminal(SIZE, "xterm"):
                raise AssertionError("there is no terminal")
        await client.ping()


async def test_a_lost_machine_ends_its_terminals():
    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("terminal"), OPENED)
        await agent.pipe.aclose()

    async with connected(script) as client:
        with pytest.raises(AgentGone):
            async with client.terminal(SIZE, "xterm") as terminal:
                await terminal.receive()


ATTACKS: dict[str, tuple[dict[str, Any], bytes]] = {
    "unknown event": ({"event": "explode"}, b""),
    "no event": ({}, b""),
    "output without bytes": ({"event": "output"}, b""),
    "more output than the window": ({"event": "output"}, bytes(OUTPUT_WINDOW + 1)),
    "a window beyond the limit": ({"event": "window", "bytes": 1}, b""),
    "a negative window": ({"event": "window", "bytes": -1}, b""),
    "a window that is no number": ({"event": "window", "bytes": True}, b""),
    "a huge exit code": ({**EXITED, "exit_code": 2**40}, b""),
    "a signal that is a sentence": ({**EXITED, "signal": "SIGKILL or so"}, b""),
    "an end that is none": ({"ok": "yes"}, b""),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_on_a_terminal_is_a_protocol_error(attack: str):
    async def script(agent: FakeAgent) -> None:
        terminal = await agent.expect("terminal")
        await agent.reply(terminal, OPENED)
        await agent.reply(terminal, *ATTACKS[attack])
        await anyio.sleep_forever()

    async def use(client: AgentClient) -> None:
        async with client.terminal(SIZE, "xterm") as terminal:
            while await terminal.receive():
                pass

    async with connected(script) as client:
        with pytest.raises(ProtocolError):
            await use(client)
