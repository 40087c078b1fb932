"""All tests of machines and all attacks on them, for drivers that need real KVM, in an emulated host that has it.

They take half an hour or more for each driver, so they run only if they are asked for, by files or folders:

    TEST_MICROVMS="tests/contract tests/security" pytest tests/functional/test_microvm_suites.py

The word `clones` compares them with QEMU, ten clones of each.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from mcp_sandbox.app import open_host
from mcp_sandbox.config import load_settings
from tests.functional.emulated_host import Hardware, run_in_emulated_host
from tests.functional.emulated_suite import Suite, run_suite

ASKED_FOR = "TEST_MICROVMS"
HOURS = 3600.0
PROGRAMS = {"qemu": "qemu-system-x86_64", **{name: name for name in ("firecracker", "cloud-hypervisor")}}
CLONES = "clones"
TEMPLATES = (Path(__file__).parent / "emulated_templates",)  # with a small one in place of the default template
ASKED = os.environ.get(ASKED_FOR, "").split()
SUITES = [word for word in ASKED if word != CLONES]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(12 * HOURS),
    pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="needs QEMU"),
]


@pytest.mark.skipif(not SUITES, reason=f"takes long; name the tests in {ASKED_FOR}")
@pytest.mark.flaky(reruns=0)  # not a second time: each test inside is repeated if it fails
@pytest.mark.parametrize("driver", ["cloud-hypervisor", "firecracker"])
async def test_the_suites_pass_under_real_kvm(driver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    if not shutil.which(driver):
        pytest.skip(f"needs the program {driver} on the PATH")
    async with open_host(load_settings(driver="qemu", template_path=TEMPLATES)) as host:
        template = host.settings.catalogue.load(host.settings.template)
        image, kernel = await host.builder.build_image(template), await host.builder.build_kernel()
    with capsys.disabled():  # it takes long: show what happens
        progress = await run_suite(Suite(driver, SUITES, template, image, kernel), host.store, tmp_path, print)
    assert [report for report in progress.reports if report["what"] == "failed"] == []
    first, *_ = [report["count"] for report in progress.reports if report["what"] == "collected"]
    assert len(progress.settled) == first > 0


@pytest.mark.skipif(CLONES not in ASKED, reason=f"takes an hour; {ASKED_FOR}={CLONES} asks for it")
@pytest.mark.flaky(reruns=0)
async def test_ten_clones_of_each_driver_have_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with open_host(load_settings(driver="qemu", template_path=TEMPLATES)) as host:
        built = await host.builder.build(host.settings.catalogue.load(host.settings.template), host.driver)
    script = Path(__file__).parent / "clones_script.py"
    printed = await run_in_emulated_host([script], host.store, built, tmp_path, Hardware("6G", own_time=True))
    with capsys.disabled():
        print(printed)
    facts = [json.loads(line.removeprefix("CLONES ")) for line in printed.splitlines() if line.startswith("CLONES ")]
    there = {driver for driver, program in PROGRAMS.items() if shutil.which(program)}
    assert {fact["what"] for fact in facts if "error" not in fact} == there, printed
