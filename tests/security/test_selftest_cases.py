"""Everything that `mcp-sandbox selftest --security` promises holds, on every driver that works here.

The cases about the network are in tests/contract/test_offline.py.
"""

import pytest

from mcp_sandbox.app import Host
from mcp_sandbox.commands.selftest import bombs
from mcp_sandbox.commands.selftest.cases import SECURITY, Case
from mcp_sandbox.commands.selftest.results import Verdict
from mcp_sandbox.commands.selftest.subject import Box, Subject
from vmm.types import Accel

pytestmark = pytest.mark.vm

CASES = [case for case in SECURITY if case.topic != "network"]
# They take minutes on an emulated CPU, and tests/contract/test_limits.py tries the same there.
HEAVY = (bombs.memory_bomb, bombs.shared_memory_bomb, bombs.full_disk, bombs.flood)


@pytest.fixture
def emulated(host: Host, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU is emulated. Then attacks are made as code only: starting Python for commands takes seconds.

    Commands have the same rights, see test_guest_filter.py; on other drivers all attacks are made both ways.
    """
    emulated = host.choice.verdict.accel is Accel.TCG
    if emulated:
        monkeypatch.setattr(Box, "ways", ("code",))
    return emulated


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_case_holds(subject: Subject, case: Case, emulated: bool):
    if emulated and case.check in HEAVY:
        pytest.skip("takes minutes on an emulated CPU, see tests/contract/test_limits.py")
    result = await case.run(subject)
    expected = Verdict.NOT_APPLICABLE if case.exempt(subject) else Verdict.HELD
    assert result.verdict is expected, result.detail
