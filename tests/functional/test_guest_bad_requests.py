"""Requests that no honest host sends, and things that no honest code does: each costs an error, never the machine."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import WarmUp
from guest.errors import RequestRefused
from tests.functional.guest_harness import SEPARATE_USER, agent_client, command, run
from tests.waiting import HANG_S

LIMIT_S = HANG_S
HUGE = 10**400  # not even a float
RUN: dict[str, Any] = {"grace_ms": 1, "head_bytes": 1000, "tail_bytes": 0, "max_display_bytes": 1000}
WARM: dict[str, Any] = {"language": "python", "env": {}, "service": None, "user_namespaces": False}
REFRESH: dict[str, Any] = {"hostname": "h", "machine_id": "0", "time_ns": 0, "network": "none", "reseed": False}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client() as client:
        yield client


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    with anyio.fail_after(LIMIT_S):
        yield


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("read", {"path": "f", "offset": 2**63, "limit": 1}),
        ("read", {"path": "f", "offset": -1, "limit": 1}),
        ("read", {"path": "f", "offset": HUGE, "limit": HUGE}),
        ("read", {"path": "f", "offset": "x", "limit": 1}),
        ("read", {"path": "a\0b", "offset": 0, "limit": 1}),
        ("read", {"path": "\ud800", "offset": 0, "limit": 1}),
        ("read", {"path": "a" * 60_000, "offset": 0, "limit": 1}),
        ("read", {"path": "a/" * 30_000, "offset": 0, "limit": 1}),
        ("read", {"path": ["f"], "offset": 0, "limit": 1}),
        ("read", {"path": "loop", "offset": 0, "limit": 1}),
        ("read", {"path": "chain-1", "offset": 0, "limit": 1}),
        ("read", {"path": "fifo", "offset": 0, "limit": 1}),
        ("read", {"path": "/dev/zero", "offset": 0, "limit": 1}),
        ("read", {"path": "/proc/self/mem", "offset": 0, "limit": 1}),
        ("read", {}),
        ("write", {"path": "chain-1", "upload": 1, "last": True}),
        ("write", {"path": "fifo", "upload": 1, "last": True}),
        ("write", {"path": "a/" * 30_000 + "f", "upload": 1, "last": True}),
        ("write", {"path": "f\ud800", "upload": 1, "last": True}),
        ("write", {"path": "x", "upload": {}, "last": True}),
        ("list", {"path": "f", "max_entries": 1, "recursive": True}),
        ("list", {"path": ".", "max_entries": {}, "recursive": True}),
        ("abandon", {"upload": None}),
        ("make_folder", {"path": None}),
        ("run", {}),
        ("run", {**RUN, "head_bytes": None}),
        ("run", {**RUN, "kind": "ä" * 10_000}),
        ("run", {**RUN, "kind": []}),
        ("run", {**RUN, "kind": "command", "code_bytes": HUGE}),
        ("stop", {"run": "x"}),
        ("refresh", {**REFRESH, "time_ns": 2**80}),
        ("refresh", {**REFRESH, "hostname": "\ud800"}),
        ("refresh", {**REFRESH, "time_ns": []}),
        ("warm", {**WARM, "env": []}),
        ("warm", {**WARM, "env": {"A\0": "b"}}),
        ("warm", {**WARM, "service": 5}),
        ("hello", {}),
        ("x" * 60_000, {}),
        ([], {}),
        ({}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_request_is_refused_and_the_sandbox_goes_on(machine, op, args):
    await run(
        machine,
        "import os\nopen('f', 'w').close()\n"
        "if not os.path.lexists('loop'):\n"
        "    os.symlink('loop', 'loop'); os.mkfifo('fifo')\n"
        "    for n in range(2000): os.symlink(f'chain-{n + 1}', f'chain-{n}')",
    )
    with pytest.raises(RequestRefused):
        await machine._channel.ask(op, args)
    assert (await run(machine, "1 + 1")).shown == ["2"]


async def test_limits_beyond_all_bounds_are_brought_back_to_them(machine):
    for value in (HUGE, -HUGE):
        frame = await machine._channel.ask("list", {"path": ".", "max_entries": value, "recursive": False})
        assert frame.header["ok"]
        chunk = await machine._channel.ask("read", {"path": "/etc/passwd", "offset": 0, "limit": value})
        assert bool(chunk.body) is (value > 0)


@pytest.mark.parametrize("options", [{"stdin": 5}, {"stdin": None}])
async def test_options_that_make_no_sense_are_an_error_of_the_run(machine, options):
    await run(machine, "kept = 1")
    result = await run(machine, "kept", options=options)
    assert (result.finished.status, result.finished.state) == ("error", "kept")
    assert (await run(machine, "kept")).shown == ["1"]


async def test_warm_up_code_too_long_for_a_zygote_is_refused_at_once():
    async with agent_client(None) as client:
        with pytest.raises(RequestRefused, match="longer than"):
            await client.warm(WarmUp(code="#" * 500_000), timeout_s=LIMIT_S)


async def test_a_file_can_be_written_more_directories_deep_than_python_recurses(machine):
    path = "d/" * 1300 + "file"
    await machine.write(path, b"deep down")
    assert (await machine.read(path, limit=100)).data == b"deep down"


async def test_a_directory_whose_name_is_not_text_does_not_stop_later_commands(machine):
    await command(machine, r"d=$(printf '\377'); mkdir $d && cd $d && rmdir ../$d")
    ran = await command(machine, "pwd")
    assert ran.stdout == "/workspace\n"
    assert "back in /workspace" in ran.stderr


async def test_a_command_with_a_nul_character_is_refused(machine):
    with pytest.raises(RequestRefused, match="NUL"):
        await command(machine, "echo a\0b")


# Prints the errors of unshare(CLONE_NEWUSER), which is also refused to a process in a chroot as here, and of clone3.
NEW_NAMESPACE = """
import ctypes, errno
kernel = ctypes.CDLL(None, use_errno=True)
for call in (lambda: kernel.unshare(0x1000_0000), lambda: kernel.syscall(435, 0, 0)):
    print(errno.errorcode[ctypes.get_errno()] if call() == -1 else "done")
"""


async def test_code_and_commands_cannot_make_namespaces(machine):
    """`tests/security/test_guest_filter.py` tries every call that the filter refuses, in real machines."""
    await machine.write("calls.py", NEW_NAMESPACE.encode())
    for ran in (await run(machine, NEW_NAMESPACE), await command(machine, "python3 calls.py")):
        assert ran.stdout.split() == ["EPERM", "ENOSYS"]


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_modules_that_code_leaves_are_not_imported_with_the_agents_privileges():
    """A kernel that dies is replaced by a process that imports the template's modules anew."""
    plant = "import os\nopen('colorsys.py', 'w').write('import os; ids = os.getresuid()')\nos._exit(1)"
    async with agent_client("import colorsys", "--one-kernel") as client:
        await run(client, plant)
        assert (await run(client, "import colorsys; colorsys.ids")).shown == ["(1000, 1000, 1000)"]


async def test_a_kernel_that_cannot_be_replaced_costs_one_run_and_not_the_agent():
    """Code that shares its user with the agent keeps the agent from starting processes for a while."""
    forbid = """import os, resource
agent = next(int(pid) for pid in os.listdir('/proc') if pid.isdigit()
    and b'guest.agent\\0--stdio' in open(f'/proc/{pid}/cmdline', 'rb').read())
resource.prlimit(agent, resource.RLIMIT_NPROC, (0, resource.prlimit(agent, resource.RLIMIT_NPROC)[1]))
os._exit(1)"""
    async with agent_client("", "--own-pids", "--one-kernel", user="none") as client:
        await run(client, forbid)
        with pytest.raises(RequestRefused) as refusal:
            await run(client, "1 + 1")
        assert refusal.value.code == "no_kernel"
        assert (await client.list("/workspace", max_entries=10, recursive=False)).entries == ()
