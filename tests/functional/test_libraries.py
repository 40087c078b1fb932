"""python-data-analysis: every library and program that it promises is imported and used in one sandbox."""

import json
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app import Host, open_service
from mcp_sandbox.runs.requests import CommandRun
from mcp_sandbox.views import RunView
from tests.functional.machines import only

pytestmark = [pytest.mark.vm, only("gvisor"), pytest.mark.anyio]

OWNER = "test"
SCRIPT = Path(__file__).with_name("libraries_script.py")  # imports what this host does not have
LAST = "locales"  # of the checks
LIMIT_S = 600.0  # two minutes on two busy cores


async def test_every_promised_library_and_program_works_in_a_sandbox_of_the_usual_size(host: Host):
    async with open_service(host, pooled=False) as service:
        box = await service.create(OWNER, "python-data-analysis")
        await service.write(OWNER, box.sandbox_id, "checks.py", SCRIPT.read_bytes())
        with anyio.fail_after(LIMIT_S + 60):
            result = await service.run(
                CommandRun(OWNER, "python checks.py 2>/dev/null", box.sandbox_id, timeout_s=LIMIT_S)
            )
    assert isinstance(result, RunView)
    checks = [json.loads(line) for line in result.stdout.head.splitlines() if line.startswith("[")]
    assert [check for check in checks if check[2]] == []
    assert (result.status, checks[-1][0]) == ("ok", LAST), checks
