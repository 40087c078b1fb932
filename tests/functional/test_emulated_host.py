"""What this host may not have: KVM that works, control groups of version 2, a user's systemd. So it is given them.

One boot of the emulated host carries all scripts, see emulated_host.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.app import open_host
from mcp_sandbox.config import load_settings
from tests.functional.emulated_host import SYSTEMD, run_in_emulated_host

SCRIPTS = [Path(__file__).parent / f"{name}_script.py" for name in ("kvm", "limits", "scopes")]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="needs QEMU"),
]

EMULATED_S = 1500.0  # minutes on an idle host
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
async def printed(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    async with open_host(load_settings(driver="qemu")) as host:
        built = await host.builder.find(host.settings.catalogue.load(host.settings.template), host.driver)
    assert built is not None, "build the template first: mcp-sandbox template build"
    scratch = tmp_path_factory.mktemp("host")
    with anyio.fail_after(EMULATED_S):
        printed = await run_in_emulated_host(SCRIPTS, host.store, built, scratch)
    shutil.rmtree(scratch)
    return printed


def facts(printed: str, script: str) -> Facts:
    """What a script told, by what it is about."""
    lines = [line.removeprefix(script) for line in printed.splitlines() if line.startswith(f"{script} ")]
    assert lines, printed
    return {fact.pop("what"): fact for fact in map(json.loads, lines)}


async def test_a_tiny_guest_runs_under_real_kvm(printed: str):
    told = facts(printed, "KVM")["tiny guest"]
    assert told == {"usable": True, "reason": "a tiny guest ran under KVM"}


async def test_a_machine_boots_freezes_and_continues_under_real_kvm_as_a_user_of_its_own(printed: str):
    told = facts(printed, "KVM")
    assert told["probe"] == {"accel": "kvm", "reason": "a guest booted under KVM", "limits": []}
    assert told["restored"]["shown"] == ["('sandbox-kvm', 42)"], printed
    assert int(told["restored"]["uid"]) >= 1_900_000_000
    assert abs(told["restored"]["skew_s"]) < 1
    assert "/mcp-sandbox/" in told["restored"]["group"]


async def test_the_limits_of_cgroup_version_2_are_really_kept(printed: str):
    told = facts(printed, "LIMITS")
    assert told["detected"] == {"version": 2, "text": "cgroup v2: memory, cpu, pids"}
    assert told["memory"]["signal"] == 9
    assert told["memory"]["told"] == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "out of memory": True,
    }
    assert told["enough memory"] == {"printed": "has it all", "told": {"out of memory": False}}
    assert told["pids"] == {"forked": "9"}  # beside itself


async def test_a_frozen_group_stands_still_goes_on_and_can_be_killed(printed: str):
    told = facts(printed, "LIMITS")
    assert told["frozen"] == {"can": True, "silent": True, "then": "12"}
    assert told["killed"] == {"left": False}


async def test_no_group_is_left_and_those_of_a_dead_server_are_swept(printed: str):
    assert facts(printed, "LIMITS")["swept"] == {"removed": 1, "left": []}


async def test_a_group_that_an_ordinary_user_can_make_but_not_fill_does_not_count(printed: str):
    told = facts(printed, "LIMITS")["user in a session"]
    assert told["seen"].startswith("only per-process limits: cgroup v2 is mounted, but no process can be moved")
    assert told["left"] == ["session"]


@pytest.mark.skipif(not Path(SYSTEMD).exists(), reason="needs systemd's files")
async def test_an_ordinary_users_systemd_keeps_the_same_limits(printed: str):
    told = facts(printed, "SCOPES")
    assert told["detected"] == {"text": "systemd user scopes: memory, cpu, pids", "gap": None}
    assert told["inside"] == {
        "slice": "app.slice",
        "session": False,
        "memory.max": str(64 << 20),
        "cpu.max": "50000 100000",
        "pids.max": "16",
    }
    assert told["memory"] == {"signal": 9, "printed": ""}
    assert told["frozen"] == {"can": True, "silent": True, "then": "12"}
    assert told["killed"] == {"left": False}
    assert told["ended"] == {"left": []}
