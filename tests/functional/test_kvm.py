"""The KVM half of the qemu driver. This host may have no KVM that works, so it is given one: see emulated_host."""

import json
import shutil
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app import open_host
from mcp_sandbox.config import load_settings
from templates.model import load_template
from tests.functional.emulated_host import run_in_emulated_host

SCRIPT = Path(__file__).parent / "kvm_script.py"

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]


@pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="needs QEMU")
async def test_a_machine_boots_freezes_and_continues_under_real_kvm_as_a_user_of_its_own(tmp_path):
    async with open_host(load_settings(driver="qemu")) as host:
        built = await host.builder.find(load_template(host.settings.template), host.driver)
    assert built is not None, "build the template first: mcp-sandbox template build"
    with anyio.fail_after(540):
        printed = await run_in_emulated_host(SCRIPT, host.store, built, tmp_path)
    shutil.rmtree(tmp_path)
    facts = {
        fact["what"]: fact
        for line in printed.splitlines()
        if line.startswith("KVM ")
        for fact in [json.loads(line[4:])]
    }
    assert facts["probe"] == {"what": "probe", "accel": "kvm", "reason": "a guest booted under KVM"}
    assert facts["restored"]["shown"] == ["('sandbox-kvm', 42)"], printed
    assert int(facts["restored"]["uid"]) >= 1_900_000_000
    assert abs(facts["restored"]["skew_s"]) < 1
