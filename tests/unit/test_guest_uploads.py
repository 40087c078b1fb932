"""Files sent to an agent in parts."""

import anyio
import anyio.lowlevel
import pytest

from guest.agent import file_requests
from guest.client.uploads import MAX_UPLOADS
from guest.errors import RequestRefused
from tests.unit.scripted_agent import FakeAgent, connected

FILE = {"path": "/workspace/x", "kind": "file", "size": 2, "mtime": 0.0}


async def test_a_file_arrives_with_its_last_part():
    seen: list[bool] = []

    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("write"), {"ok": True})
        seen.append(True)
        await agent.reply(await agent.expect("write"), {"ok": True, "file": FILE})
        await anyio.sleep_forever()

    async with connected(script) as client, client.upload("x") as upload:
        await upload.add(b"a")
        assert (await upload.finish(b"b")).size == 2
    assert seen == [True]


async def test_what_was_sent_of_a_file_is_discarded_if_the_rest_does_not_come():
    discarded = anyio.Event()

    async def script(agent: FakeAgent) -> None:
        await agent.reply(await agent.expect("write"), {"ok": True})
        await agent.reply(await agent.expect("abandon"), {"ok": True})
        discarded.set()
        await anyio.sleep_forever()

    async with connected(script) as client:
        with anyio.CancelScope() as scope:
            async with client.upload("x") as upload:
                await upload.add(b"a")
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert discarded.is_set()


async def test_what_the_agent_refused_is_not_discarded_again():
    async def script(agent: FakeAgent) -> None:
        error = {"code": "no_space", "message": "full"}
        await agent.reply(await agent.expect("write"), {"ok": False, "error": error})
        await agent.reply(await agent.expect("ping"), {"ok": True})
        await anyio.sleep_forever()

    async with connected(script) as client:
        with pytest.raises(RequestRefused, match="full"):
            async with client.upload("x") as upload:
                await upload.add(b"a")
        await client.ping()


async def test_no_more_files_are_half_sent_than_the_agent_keeps():
    assert MAX_UPLOADS < file_requests.MAX_UPLOADS

    async def script(agent: FakeAgent) -> None:
        for _ in range(MAX_UPLOADS):
            await agent.reply(await agent.expect("write"), {"ok": True})
        await agent.reply(await agent.expect("abandon"), {"ok": True})
        await agent.reply(await agent.expect("write"), {"ok": True})
        for _ in range(MAX_UPLOADS):
            await agent.reply(await agent.expect("abandon"), {"ok": True})
        await anyio.sleep_forever()

    begun: list[int] = []
    leave = [anyio.Event() for _ in range(MAX_UPLOADS + 1)]

    async with connected(script) as client:

        async def send(number: int) -> None:
            async with client.upload(f"file-{number}") as upload:
                await upload.add(b"a")
                begun.append(number)
                await leave[number].wait()

        async with anyio.create_task_group() as tasks:
            for number in range(MAX_UPLOADS + 1):
                tasks.start_soon(send, number)
                await anyio.wait_all_tasks_blocked()
            assert begun == list(range(MAX_UPLOADS))
            leave[0].set()
            await anyio.wait_all_tasks_blocked()
            assert begun[-1] == MAX_UPLOADS
            for event in leave:
                event.set()
