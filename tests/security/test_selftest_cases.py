"""Everything that `mcp-sandbox selftest --security` promises holds, on every driver that works here.

The cases about the network are in tests/contract/test_offline.py.
"""

import pytest

from mcp_sandbox.commands.selftest.cases import SECURITY, Case
from mcp_sandbox.commands.selftest.results import Verdict
from mcp_sandbox.commands.selftest.subject import Subject

pytestmark = pytest.mark.vm

CASES = [case for case in SECURITY if case.topic != "network"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_case_holds(subject: Subject, case: Case):
    result = await case.run(subject)
    expected = Verdict.NOT_APPLICABLE if case.exempt(subject) else Verdict.HELD
    assert result.verdict is expected, result.detail
