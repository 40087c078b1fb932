"""Where the programs of drivers are downloaded from."""

import pytest

from templates.program import program_inputs
from vmm.drivers.gvisor import RUNSC


@pytest.mark.parametrize(
    ("host", "suite"), [("bullseye", "trixie"), ("bookworm", "trixie"), ("trixie", "trixie"), ("forky", "forky")]
)
def test_gvisor_comes_from_the_hosts_suite_or_the_first_one_with_a_new_release(
    monkeypatch: pytest.MonkeyPatch, host: str, suite: str
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: host)
    assert program_inputs(RUNSC)["suite"] == suite
