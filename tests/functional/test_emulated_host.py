"""Working KVM, cgroup v2 and a systemd user session, in an emulated host: this one may have none of them.

The emulated host boots once and runs all scripts; see `emulated_host`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.app import open_host
from mcp_sandbox.config import load_settings
from tests.functional.emulated_host import SYSTEMD, Hardware, run_in_emulated_host
from vmm.process import run_tool

MICROVMS = ("firecracker", "cloud-hypervisor")  # each has the name of its program, as in microvms_script.py
MONITORS = [name for name in MICROVMS if shutil.which(name)]
SCRIPTS = [
    Path(__file__).parent / f"{name}_script.py"
    for name in ("kvm", "limits", "scopes", *(["microvms"] if MONITORS else []))
]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="needs QEMU"),
]

EMULATED_S = 1500.0  # minutes on an idle host
DISK = "20G"  # sparse
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
async def printed(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    async with open_host(load_settings(driver="qemu")) as host:
        built = await host.builder.find(host.settings.catalogue.load(host.settings.template), host.driver)
    assert built is not None, "build the template first: mcp-sandbox template build"
    scratch = tmp_path_factory.mktemp("host")
    hardware = Hardware()
    if MONITORS:  # which save a machine with 3.5 GB and copy it
        hardware = Hardware("12G", disks=[disk := scratch / "disk.ext4"])
        await run_tool(["mkfs.ext4", "-q", str(disk), DISK])
    with anyio.fail_after(EMULATED_S):
        printed = await run_in_emulated_host(SCRIPTS, host.store, built, scratch, hardware)
    shutil.rmtree(scratch)
    return printed


def facts(printed: str, script: str) -> Facts:
    """Return what a script reported, by topic."""
    lines = [line.removeprefix(script) for line in printed.splitlines() if line.startswith(f"{script} ")]
    assert lines, printed
    return {fact.pop("what"): fact for fact in map(json.loads, lines)}


async def test_a_tiny_guest_runs_under_real_kvm(printed: str):
    found = facts(printed, "KVM")["tiny guest"]
    assert found == {"usable": True, "reason": "a tiny guest ran under KVM"}


async def test_a_machine_boots_and_is_restored_under_real_kvm_as_a_separate_user(printed: str):
    found = facts(printed, "KVM")
    assert found["probe"] == {"accel": "kvm", "reason": "a guest booted under KVM", "limits": []}
    assert found["restored"]["shown"] == "sandbox-kvm 42\n", printed
    assert int(found["restored"]["uid"]) >= 1_900_000_000
    assert abs(found["restored"]["skew_s"]) < 1
    assert "/mcp-sandbox/" in found["restored"]["group"]


async def test_cgroup_v2_enforces_the_limits(printed: str):
    found = facts(printed, "LIMITS")
    assert found["detected"] == {"version": 2, "text": "cgroup v2: memory, cpu, pids"}
    assert found["memory"]["signal"] == 9
    assert found["memory"]["files"] == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "cpu.max": "15000 10000",  # half a CPU, and one more while it starts
        "out of memory": True,
    }
    assert found["enough memory"] == {"printed": "has it all", "files": {"out of memory": False}}
    assert found["pids"] == {"forked": "9"}  # beside itself


async def test_a_frozen_cgroup_can_be_thawed_and_killed(printed: str):
    found = facts(printed, "LIMITS")
    assert found["frozen"] == {"can": True, "silent": True, "then": "12"}
    assert found["killed"] == {"left": False}


async def test_no_cgroup_is_left_and_those_of_a_dead_server_are_swept(printed: str):
    assert facts(printed, "LIMITS")["swept"] == {"removed": 1, "left": []}


async def test_cgroups_that_a_user_may_create_but_not_fill_are_not_used(printed: str):
    found = facts(printed, "LIMITS")["user in a session"]
    assert found["seen"].startswith("only per-process limits: cgroup v2 is mounted, but no process can be moved")
    assert found["left"] == ["session"]


@pytest.mark.skipif(not Path(SYSTEMD).exists(), reason="needs systemd's files")
async def test_systemd_user_scopes_enforce_the_same_limits(printed: str):
    found = facts(printed, "SCOPES")
    assert found["detected"] == {"text": "systemd user scopes: memory, cpu, pids", "gap": None}
    assert found["inside"] == {
        "slice": "app.slice",
        "session": False,
        "memory.max": str(64 << 20),
        "cpu.max": "5000 10000",
        "pids.max": "16",
    }
    assert found["memory"] == {"signal": 9, "printed": ""}
    assert found["frozen"] == {"can": True, "silent": True, "then": "12"}
    assert found["killed"] == {"left": False}
    assert found["ended"] == {"left": []}


@pytest.mark.parametrize("driver", MICROVMS)
async def test_microvms_boot_and_are_saved_restored_and_copied_under_real_kvm(driver: str, printed: str):
    if driver not in MONITORS:
        pytest.skip(f"needs the program {driver} on the PATH")
    lines = [json.loads(line.removeprefix("MICROVM")) for line in printed.splitlines() if line.startswith("MICROVM ")]
    found = {line["what"]: line for line in lines if line["driver"] == driver}
    assert "failed" not in found, found["failed"]
    assert found["probe"]["usable"] is True
    own_kernel = found["a kernel of the user's own"]
    assert (own_kernel["usable"], own_kernel["reason"]) == (True, "a guest booted under KVM")
    assert found["restored"]["shown"] == ["('sandbox-a', 6)"]
    assert found["goes on"]["shown"] == ["42"]  # on another connection
    assert found["forked"]["shown"] == ["(6, 'sandbox-b')"]
    assert found["usage"]["mb"] < 256  # of 512: what the snapshot has is read when it is needed
    if driver == "firecracker":
        assert found["goes on"]["mb"] < 256  # a copy is made from changes
    assert found["large"]["shown"] == found["large, copied"]["shown"] == ["(42, True)"]
    assert "machine broken ended with" in found["without a root file system"]["error"]
    assert found["left"]["files"] == []
