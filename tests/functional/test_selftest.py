"""`mcp-sandbox selftest` with real machines, as root and as an ordinary user."""

import json
import os
import subprocess
import sys

import pytest

from mcp_sandbox.commands.selftest.cases import BASICS, SECURITY
from mcp_sandbox.config import load_settings
from mcp_sandbox.machines.provider import HostFacts
from tests.functional.checkout import REPO
from tests.functional.ordinary_user import ordinary_user
from tests.functional.test_ordinary_user import COPIED, copy_store
from tests.waiting import BUILD_S

pytestmark = pytest.mark.vm

# Without cgroups nothing bounds the memory of all processes together, see docs/threat-model.md.
UNLIMITED = {"memory of the kernel is limited"}
PRODUCT = (sys.executable, "-m", "mcp_sandbox")


def test_a_host_with_working_sandboxes_passes(in_force: HostFacts):
    done = subprocess.run([*PRODUCT, "selftest"], capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert in_force.driver in done.stdout
    assert all(case.name in done.stdout for case in BASICS)
    assert "nothing broken" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("driver", ["bubblewrap"])  # with a kernel of its own a machine is the same for every user
def test_the_sandboxes_of_an_ordinary_user_withstand_all_attacks(driver: str):
    with ordinary_user() as user:
        store = copy_store(load_settings(), COPIED[driver], user)
        environment = {"MCP_SANDBOX_HOME": str(store), "MCP_SANDBOX_DRIVER": driver}
        for arguments in (("template", "build"), ("selftest", "--security", "--json")):
            argv = user.command([*PRODUCT, *arguments], environment)
            done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=BUILD_S)
        report = json.loads(done.stdout)
        bad = {case["name"]: case["detail"] for case in report["cases"] if case["advice"]}
        assert bad.keys() <= UNLIMITED, bad
        assert {case.name for case in SECURITY} < {case["name"] for case in report["cases"]}
        assert (done.returncode, report["passed"]) == (1 if bad else 0, not bad)
        assert user.processes() == []
