"""All tests of machines and all attacks on them, for drivers that need real KVM, in an emulated host that has it.

They take hours for each driver, so they run only if they are asked for, by files or folders:

    TEST_MICROVMS="tests/contract tests/security" pytest tests/functional/test_microvm_suites.py
"""

import os
import shutil
from pathlib import Path

import pytest

from mcp_sandbox.app import open_host
from mcp_sandbox.config import load_settings
from tests.functional.emulated_suite import Suite, run_suite

ASKED_FOR = "TEST_MICROVMS"
HOURS = 3600.0
SUITES = os.environ.get(ASKED_FOR, "").split()

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(12 * HOURS),
    pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="needs QEMU"),
    pytest.mark.skipif(not SUITES, reason=f"takes hours; name the tests in {ASKED_FOR}"),
]


@pytest.mark.flaky(reruns=0)  # not a second time: each test inside is repeated if it fails
@pytest.mark.parametrize("driver", ["cloud-hypervisor", "firecracker"])
async def test_the_suites_pass_under_real_kvm(driver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    if not shutil.which(driver):
        pytest.skip(f"needs the program {driver} on the PATH")
    async with open_host(load_settings(driver="qemu")) as host:
        template = host.settings.catalogue.load(host.settings.template)
        image, kernel = await host.builder.build_image(template), await host.builder.build_kernel()
    with capsys.disabled():  # it takes hours: show what happens
        reports = await run_suite(Suite(driver, SUITES, image, kernel), host.store, tmp_path, print)
    ends = [report for report in reports if report["what"] in ("passed", "failed", "skipped")]
    assert [report for report in ends if report["what"] == "failed"] == []
    [collected] = [report["count"] for report in reports if report["what"] == "collected"]
    assert len(ends) == collected > 0
