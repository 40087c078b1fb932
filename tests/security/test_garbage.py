"""Bytes before an agent's first answer: skipped only where an earlier conversation can have left some, and bounded.

`tests/unit/test_guest_floods.py` has every kind of garbage. Here it comes out of real machines.
"""

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.errors import ProtocolError
from guest.protocol import MAGIC, MAX_BODY, encode
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from tests.functional.machines import Machines, only
from tests.security.hostile_agents import pack_hostile_agent
from tests.waiting import HANG_S
from vmm.types import GuestCode

pytestmark = pytest.mark.vm

PATH = "/workspace/garbage"
HARMLESS = b"x" * MAX_BODY
FALSE_STARTS = MAGIC * (MAX_BODY // len(MAGIC))  # each may be a frame, and has to be looked at


@only("gvisor", "bubblewrap")
async def test_an_agent_that_sends_garbage_on_a_connection_of_its_own_is_refused_at_once(
    machines: Machines, tmp_path: Path
):
    pack_hostile_agent(tmp_path / "hostile.tar", first="raw(b'noise')")
    hostile = replace(machines.built, boot=GuestCode(tmp_path / "hostile.tar"), snapshot=None)
    with anyio.fail_after(HANG_S), pytest.raises(ProtocolError, match="the magic is missing"):
        async with start(machines.host.driver, hostile, new_identity()):
            pass


@only("qemu")
async def test_what_code_left_in_the_serial_port_is_skipped_until_it_looks_like_too_many_frames(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.restored() as machine:
            stream = await leave_half_an_answer(await machine.connect(), HARMLESS)
            stream = await leave_half_an_answer(stream, FALSE_STARTS)  # it is greeted once more
            with pytest.raises(ProtocolError, match="no frame in"):
                await leave_half_an_answer(stream, HARMLESS)


async def leave_half_an_answer(stream: ByteStream, content: bytes) -> ByteStream:
    """Greet an agent, ask for a file with this content, and give up in the middle of the answer."""
    async with AgentClient.open(stream, timeout_s=HANG_S, seeking=True) as agent:
        await agent.write(PATH, content)
        stream, _ = await agent.detach()
    await stream.send(encode({"id": 1, "op": "read", "path": PATH, "offset": 0, "limit": MAX_BODY}))
    await stream.receive(256)
    return stream
