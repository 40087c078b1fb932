"""A machine without a network cannot reach the web, its host, or another machine."""

import pytest

from mcp_sandbox.commands.selftest.cases import SECURITY, Case
from mcp_sandbox.commands.selftest.results import Verdict
from mcp_sandbox.commands.selftest.subject import Subject

pytestmark = [pytest.mark.vm, pytest.mark.rights]

OFFLINE = [case for case in SECURITY if case.topic == "network"]


@pytest.mark.parametrize("case", OFFLINE, ids=lambda case: case.name)
async def test_a_machine_is_offline(subject: Subject, case: Case):
    result = await case.run(subject)
    assert result.verdict is Verdict.HELD, result.detail
