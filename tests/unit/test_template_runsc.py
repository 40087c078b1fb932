"""Where gVisor is fetched from."""

import pytest

from templates.runsc import runsc_inputs


@pytest.mark.parametrize(
    ("host", "suite"), [("bullseye", "trixie"), ("bookworm", "trixie"), ("trixie", "trixie"), ("forky", "forky")]
)
def test_it_comes_from_the_hosts_own_suite_or_the_first_one_that_has_a_good_one(
    monkeypatch: pytest.MonkeyPatch, host: str, suite: str
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: host)
    assert runsc_inputs()["suite"] == suite
