"""The agent's parts, without a machine."""

from pathlib import Path

GUEST = Path(__file__).parents[2] / "guest"


def test_a_kernel_does_not_import_the_agent_that_starts_it():
    assert not [file.name for file in (GUEST / "kernels").glob("*.py") if "guest.agent" in file.read_text()]
