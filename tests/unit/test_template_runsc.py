"""Where gVisor is downloaded from."""

import pytest

from templates.runsc import runsc_inputs


@pytest.mark.parametrize(
    ("host", "suite"), [("bullseye", "trixie"), ("bookworm", "trixie"), ("trixie", "trixie"), ("forky", "forky")]
)
def test_gvisor_comes_from_the_hosts_suite_or_the_first_one_with_a_new_release(
    monkeypatch: pytest.MonkeyPatch, host: str, suite: str
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: host)
    assert runsc_inputs()["suite"] == suite
