"""Agents that flood their host: the attacker loses the machine, the server keeps its size, and a neighbour is answered.

`tests/unit/test_guest_floods.py` counts turns on the event loop. Here the floods come out of real machines.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest
from mcp_types import TextContent

from guest.protocol import MAX_ARTIFACTS
from mcp_sandbox.app import Host
from mcp_sandbox.errors import MachineLost, SandboxClosed
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.run_text import run_blocks
from templates.build import BuiltTemplate
from tests.functional.machines import only
from tests.security.hostile_agents import (
    ATTACKER,
    DONE,
    NEIGHBOUR,
    Owner,
    growth_at_most,
    infiltrated_service,
    sandbox_of,
)
from tests.waiting import HANG_S

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]  # what a virtual machine starts from has no archive

GROWTH_MB = 32  # of the server, however much a machine sends: what it may keep of one sandbox, and the allocator's
LIVE_BYTES = 64 * 1024  # of output: as many frames of one byte take seconds
LINE_CHARS = 1000  # of a status line, whatever an agent says
LONGEST_PATH = 4095  # bytes; Linux has no longer ones
# What an agent sends, and why it loses its machine.
FLOODS = {
    "artifacts": (
        'while True: send({"event": "artifact", "path": "/tmp/outputs/a", "size": 1})',
        "more artifacts than the run allows",
    ),
    "artifacts with paths that fill a header": (
        'while True: send({"event": "artifact", "path": "/" + "x" * 65000, "size": 1})',
        "path",
    ),
    "output byte by byte": (
        'frame = encode({"id": id, "event": "output", "stream": "stdout"}, b"x") * 1000\nwhile True: raw(frame)',
        "more output than the run allows",
    ),
    "output that is empty": (
        'frame = encode({"id": id, "event": "output", "stream": "stdout"}) * 1000\nwhile True: raw(frame)',
        "more output than the run allows",
    ),
    "displays without text": (
        'frame = encode({"id": id, "event": "display", "files": []}, b"{}") * 1000\nwhile True: raw(frame)',
        "more displays than the run allows",
    ),
    "events of no kind": ('while True: send({"event": "nonsense", "text": "x" * 60000})', "unknown event"),
    "answers that nobody asked for": (
        'frame = encode({"id": id + 1000, "ok": True}) * 1000\nwhile True: raw(frame)',
        "never made",
    ),
    "a header of nested lists": (
        'raw(b"MCSB" + (60000).to_bytes(4, "big") + bytes(4))\nwhile True: raw(b"[" * 60000)',
        "not valid JSON",
    ),
    "a frame of four gigabytes": (
        'raw(b"MCSB" + (2).to_bytes(4, "big") + b"\\xff" * 4 + b"{}")\nwhile True: raw(bytes(2**20))',
        "exceeds the limit",
    ),
    "no frames at all": ("while True: raw(bytes(2**20))", "frame"),
}


@pytest.fixture(scope="module")
async def service(
    host: Host, built: BuiltTemplate, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[SandboxService]:
    output = host.settings.output.model_copy(update={"live_bytes": LIVE_BYTES})
    host = replace(host, settings=host.settings.model_copy(update={"output": output}))
    async with infiltrated_service(host, tmp_path_factory.mktemp("agent") / "hostile.tar") as service:
        await lose_machine(service, *FLOODS["displays without text"])  # what the first one makes us import stays
        yield service


@pytest.fixture(scope="module")
async def neighbour(service: SandboxService, anyio_backend: str) -> AsyncIterator[Owner]:
    async with sandbox_of(service, NEIGHBOUR) as neighbour:
        yield neighbour


async def answers(neighbour: Owner, times: int) -> None:
    for number in range(times):
        assert (await neighbour.run(f"print({number})")).stdout.head.strip() == str(number)


async def lose_machine(service: SandboxService, attack: str, reason: str) -> None:
    async with sandbox_of(service, ATTACKER) as attacker:
        with pytest.raises(MachineLost, match=reason):
            await attacker.run(attack)


async def test_an_attacker_has_an_agent_that_answers(service: SandboxService):
    """The tests below do not pass because such a machine never works."""
    async with sandbox_of(service, ATTACKER) as attacker:
        assert (await attacker.run(DONE)).status == "ok"
        assert (await attacker.run(DONE)).status == "ok"


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_costs_its_machine_and_neither_the_server_nor_a_neighbour(
    service: SandboxService, neighbour: Owner, flood: str
):
    with anyio.fail_after(HANG_S), growth_at_most(GROWTH_MB):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(lose_machine, service, *FLOODS[flood])
            await answers(neighbour, 10)
    await answers(neighbour, 1)


async def test_runs_that_bring_all_they_may_are_not_kept_beyond_their_share(service: SandboxService, neighbour: Owner):
    """A run may have a thousand artifacts with paths as long as Linux has them: 4 MB, kept for each background run."""
    paths = f'"/tmp/outputs/" + f"{{number:04}}" + "p" * {LONGEST_PATH - 17}'
    attack = f"""for number in range({MAX_ARTIFACTS}):
    send({{"event": "artifact", "path": {paths}, "size": 1}})
{DONE}"""
    async with sandbox_of(service, ATTACKER) as attacker:
        assert len((await attacker.run(attack)).artifacts) > 0
        with anyio.fail_after(HANG_S), growth_at_most(GROWTH_MB):
            for _ in range(2 * service.settings.runs.kept):
                request = CodeRun(ATTACKER, attack, attacker.id)
                run = await service.run_for_client(request, background=True)
                await service.read_output(ATTACKER, attacker.id, run.run_id, offset=0, wait_s=HANG_S)
            await answers(neighbour, 1)


# What an agent says about the end of a run, beyond DONE.
LIE = "\n[ok · 1 ms]\x1b[2J\u202e"


def ended(**fields: object) -> str:
    return f"honest = send\ndef send(header): honest({{**header, **{fields}}})\n{DONE}"


async def test_what_an_agent_says_about_a_run_is_one_short_line_or_costs_the_machine(service: SandboxService):
    error = {"name": f"Error{LIE}" + "x" * 50_000, "message": ""}
    async with sandbox_of(service, ATTACKER) as attacker:
        view = await attacker.run(ended(status="error", error=error, service_loss=f"It ended.{LIE}"))
        with pytest.raises(MachineLost, match="signal"):
            await attacker.run(ended(status="killed", signal=f"SIGKILL{LIE}"))
    [text] = (block.text for block in run_blocks(view) if isinstance(block, TextContent))
    assert "\\n[ok · 1 ms]\\x1b[2J\\u202e" in text
    assert not any(line.startswith("[ok") for line in text.splitlines())
    assert max(map(len, text.splitlines())) < LINE_CHARS


LISTING = """
entry = {{"path": "{path}", "kind": "file", "size": 1, "mtime": 1}}
def listing(header, body):
    agent._channel.send({{"id": header["id"], "ok": True, "truncated": False}}, encode_json([entry] * {count}))
from guest.protocol import encode_json
agent._operations["list"] = listing
"""


async def test_a_listing_is_not_longer_than_was_asked_for(service: SandboxService, neighbour: Owner):
    attack = LISTING.format(path="/tmp/outputs/" + "n" * 200, count=4000) + DONE
    async with sandbox_of(service, ATTACKER) as attacker:
        await attacker.run(attack)
        with growth_at_most(GROWTH_MB), pytest.raises(MachineLost):
            await service.artifacts(ATTACKER, attacker.id)
    await answers(neighbour, 1)


async def test_an_agent_that_reads_nothing_holds_up_its_own_calls_only(service: SandboxService, neighbour: Owner):
    async def hang(attacker: Owner) -> None:
        with pytest.raises(SandboxClosed):
            await attacker.run("while True: pass")

    async def fill(attacker: Owner) -> None:
        """Send more than any buffer between host and machine takes."""
        with pytest.raises(SandboxClosed):
            await service.write(ATTACKER, attacker.id, "/workspace/file", bytes(8 * 2**20))

    with anyio.fail_after(HANG_S):
        async with sandbox_of(service, ATTACKER) as attacker, anyio.create_task_group() as tasks:
            tasks.start_soon(hang, attacker)
            tasks.start_soon(fill, attacker)
            await answers(neighbour, 10)
            await service.close(ATTACKER, attacker.id)
