"""A driver that only tests know gets through every part of the product by its files and its name alone.

The contract suite runs with it as well: see tests/contract/conftest.py.
"""

import json
import os
from pathlib import Path

import pytest

from mcp_sandbox.app import Drivers, open_host
from mcp_sandbox.commands import setup
from mcp_sandbox.commands.bench.command import TOPICS, drivers_for
from mcp_sandbox.commands.doctor import examine
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import TooWeak
from mcp_sandbox.machines.choice import Choice, Question, decide
from templates.program import program_inputs
from templates.store import key_of
from tests.contract import toy_driver
from vmm.driver import DRIVERS, driver_info
from vmm.types import Isolation, Probe
from vmm.verdicts import Verdict

NO_KVM = Verdict(False, "there is none")
WORKS = Probe(True, "a toy ran", version="toy 1")
BROKEN = Probe(False, "toyctl is not installed")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, "toy", toy_driver.__name__)

    async def no_kvm(*_: object, **__: object) -> Verdict:
        return NO_KVM

    monkeypatch.setattr("vmm.probe.kvm", no_kvm)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Probe:
    """Let the toy's probe return this; the host need not have bubblewrap."""
    answer: Probe = request.param

    async def probe(_self: object) -> Probe:
        return answer

    monkeypatch.setattr(toy_driver.ToyDriver, "probe", probe)
    return answer


def test_it_is_registered_under_its_own_name():
    assert driver_info("toy").name == "toy"


@pytest.mark.parametrize("verdict", [BROKEN], indirect=True)
async def test_doctor_reports_it_and_how_to_install_it(tmp_path: Path, verdict: Probe):
    report = await examine(Settings(home=tmp_path, driver="toy"))
    [toy] = [driver for driver in report.drivers if driver.name == "toy"]
    assert (toy.in_force, toy.usable, toy.isolation) == (True, False, Isolation.NAMESPACE)
    assert toy.reason == verdict.reason
    assert toy.fix == "mcp-sandbox setup --driver toy (or: apt-get install -y --no-install-recommends toy-tools)"
    assert "toyctl" in {need.what for need in report.missing}


def test_setup_asks_for_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert setup.main(Settings(home=tmp_path, driver="toy"), check=True) == 1
    assert "toy-tools" in capsys.readouterr().out


@pytest.mark.parametrize("verdict", [WORKS], indirect=True)
@pytest.mark.usefixtures("verdict")
def test_setup_is_done_when_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(setup, "is_met", lambda _need: True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert setup.main(Settings(home=tmp_path, driver="toy"), check=True) == 0
    assert "toy works on this host (namespace isolation)" in capsys.readouterr().out


async def test_its_downloaded_program_is_handed_to_it(tmp_path: Path):
    program = tmp_path / "program" / key_of(program_inputs(toy_driver.TOYCTL)) / "toyctl"
    program.parent.mkdir(parents=True)
    program.touch()
    meta = {"id": "x", "inputs": {}, "details": {}, "made": "2026-01-01T00:00:00", "size_bytes": 1}
    (program.parent / "meta.json").write_text(json.dumps(meta))
    async with Drivers(Settings(home=tmp_path)) as drivers:
        toy = drivers.load("toy")
        assert isinstance(toy, toy_driver.ToyDriver)
        assert toy.config.program == program


def test_auto_tries_it_where_its_rank_puts_it():
    assert decide(Settings(), NO_KVM, {}) == Question("toy")
    choice = decide(Settings(), NO_KVM, {"toy": WORKS})
    assert isinstance(choice, Choice)
    assert choice.driver == "toy"
    assert decide(Settings(), NO_KVM, {"toy": BROKEN}) == Question("gvisor")
    assert decide(Settings(), Verdict(True, "it runs"), {}) == Question("firecracker")


def test_its_isolation_level_is_checked_against_the_settings():
    assert decide(Settings(min_isolation=Isolation.KERNEL), NO_KVM, {}) == Question("gvisor")
    with pytest.raises(TooWeak):
        decide(Settings(driver="toy", min_isolation=Isolation.KERNEL), None, {})


@pytest.mark.parametrize("verdict", [WORKS], indirect=True)
@pytest.mark.usefixtures("verdict")
async def test_a_host_that_runs_it_shows_its_title(tmp_path: Path):
    async with open_host(Settings(home=tmp_path)) as host:
        assert host.driver.name == "toy"
        assert str(host.facts).startswith("namespace (Toy Machines, native CPU)")


def test_bench_measures_what_it_can_do():
    assert "toy" in drivers_for(TOPICS)
    assert "toy" not in drivers_for({"restore": TOPICS["restore"]}), "it takes no snapshots"
