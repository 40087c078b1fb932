"""What hostile code asks for, on the bridge itself: every case of the table, over a stream in this process."""

import socket
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import ByteStream, UNIXSocketStream

from tests.waiting import HANG_S
from tests.web.refusals import CASES, Target, serving_target
from tests.web.sites import GONE, head_of
from tests.web.world import forget_proxies
from websearch.access import Caller

pytestmark = pytest.mark.anyio


@pytest.fixture
async def target(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Target]:
    forget_proxies(monkeypatch)
    async with serving_target() as target:
        yield target


async def told(stream: ByteStream, request: bytes, then: bytes) -> bytes:
    """Send a request, and more once a tunnel stands; return all that is answered."""
    answer = b""
    try:
        await stream.send(request)
        if then:
            answer = await head_of(stream) + b"\r\n\r\n"
            await stream.send(then)
        async for data in stream:
            answer += data
    except GONE:
        pass
    return answer


@pytest.mark.parametrize("name", CASES)
async def test_the_bridge_refuses(target: Target, name: str):
    case, answers = CASES[name], []
    guest, host = [await UNIXSocketStream.from_socket(end) for end in socket.socketpair()]

    async def ask() -> None:
        async with guest:
            answers.append(await told(guest, target.request(case), case.then))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await target.world.bridge().serve(host, Caller("ada", "sb-1"))
    case.check(answers[0], target.world.rules)
    target.check_nothing_left()


def test_there_are_many_cases():
    assert len(CASES) >= 120
