"""Whether a gVisor of our own is fetched, and from where."""

import pytest

from templates.runsc import runsc_inputs, runsc_wanted, system_runsc_version

DEBIAN_12 = "runsc version 0.0~20221219.0\nspec: 1.0.2-dev"
DEBIAN_13 = "runsc version 0.0~20240729.0\nspec: 1.2.0"


@pytest.mark.parametrize(
    "version", [None, DEBIAN_12, "runsc version release-20231113.0", "runsc version VERSION_MISSING"]
)
def test_one_is_fetched_where_the_systems_own_is_missing_or_old(version: str | None):
    assert runsc_wanted(version)


@pytest.mark.parametrize(
    "version", [DEBIAN_13, "runsc version release-20240101.0", "runsc version release-20260105.0-3-gab12"]
)
def test_the_systems_own_is_good_enough_from_2024_on(version: str):
    assert not runsc_wanted(version)


@pytest.mark.parametrize(
    ("host", "suite"), [("bullseye", "trixie"), ("bookworm", "trixie"), ("trixie", "trixie"), ("forky", "forky")]
)
def test_it_comes_from_the_hosts_own_suite_or_the_first_one_that_has_a_good_one(
    monkeypatch: pytest.MonkeyPatch, host: str, suite: str
):
    monkeypatch.setattr("templates.apt.host_codename", lambda etc=None: host)
    assert runsc_inputs()["suite"] == suite


@pytest.mark.anyio
async def test_a_system_without_gvisor_has_no_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vmm.process.find_tool", lambda program: None)
    assert await system_runsc_version() is None
