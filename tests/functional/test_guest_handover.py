"""A real agent that one process greets and hands over to another, which hands it back."""

import json
import socket
import sys

import anyio
from anyio.abc import ByteStream, SocketStream

from guest.client import AgentClient
from guest.client.messages import AgentState, Identity, WarmUp
from tests.functional.checkout import REPO
from tests.functional.guest_harness import START_TIMEOUT_S, agent_stream, run

IDENTITY = Identity("clone-7", "ab" * 16, b"e" * 64)

# Adopts the agent on its standard input, runs code in it, and gives it up again.
ADOPTER = """
import json, socket, sys
import anyio
from anyio.abc import SocketStream
from guest.client import AgentClient
from guest.client.messages import AgentState
from tests.functional.guest_harness import run

async def main():
    stream = await SocketStream.from_socket(socket.socket(fileno=0))
    state = AgentState.model_validate_json(sys.argv[1])
    async with AgentClient.adopt(stream, state, timeout_s=60) as client:
        result = await run(client, "kept += 1; print(kept)")
        _, state = await client.detach()
    print(json.dumps([result.stdout, state.model_dump_json()]))

anyio.run(main)
"""


async def relay(source: ByteStream, target: ByteStream) -> None:
    async for data in source:
        await target.send(data)


async def adopt_elsewhere(stream: ByteStream, state: AgentState) -> tuple[str, AgentState]:
    """Lend the agent to another process; returns what code printed there, and the state it gave back."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", ADOPTER, state.model_dump_json()]
    async with await SocketStream.from_socket(ours) as link, anyio.create_task_group() as tasks:
        tasks.start_soon(relay, stream, link)
        tasks.start_soon(relay, link, stream)
        with theirs:
            done = await anyio.run_process(command, stdin=theirs.fileno(), stderr=None, cwd=REPO)
        tasks.cancel_scope.cancel()
    stdout, state_json = json.loads(done.stdout)
    return stdout, AgentState.model_validate_json(state_json)


async def test_a_greeted_agent_is_handed_to_another_process_and_back():
    with anyio.fail_after(START_TIMEOUT_S):
        async with agent_stream() as stream:
            async with AgentClient.open(stream, timeout_s=START_TIMEOUT_S, identity=IDENTITY) as client:
                await client.warm(WarmUp(), START_TIMEOUT_S)
                await run(client, "kept = 1")
                _, state = await client.detach()
            stdout, state = await adopt_elsewhere(stream, state)
            assert stdout == "2\n"
            async with AgentClient.adopt(stream, state, timeout_s=START_TIMEOUT_S) as client:
                assert (await run(client, "kept")).shown == ["2"]
                assert client.hello.language == "python"
