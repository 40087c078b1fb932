"""What `mcp-sandbox doctor` concludes and prints."""

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest

from mcp_sandbox import app
from mcp_sandbox.commands import doctor, doctor_view
from mcp_sandbox.commands.doctor import examine, judge, one_line
from mcp_sandbox.commands.doctor_report import DriverReport, MissingReport, Report, TemplateReport
from mcp_sandbox.config import Settings, WebSettings
from tests.unit.fake_driver import FakeDriver
from vmm.driver import Driver
from vmm.types import Accel, Isolation, Probe
from vmm.verdicts import Verdict

QEMU = DriverReport(
    name="qemu",
    in_force=True,
    usable=True,
    isolation=Isolation.VM,
    accel=Accel.TCG,
    version="QEMU 7.2",
    program=None,
    features=[],
    reason="emulation (TCG): this host has no /dev/kvm",
    fix="use a host with hardware virtualization",
    missing_protections=["no host-side limits"],
)
PYTHON = TemplateReport(
    name="python",
    title="Python",
    default=True,
    built=True,
    image_bytes=400_000_000,
    snapshot_bytes=200_000_000,
    stored_bytes=900_000_000,
    memory_mb=512,
)
BUILD_TOOL = MissingReport(what="mmdebstrap", package="mmdebstrap", purpose="builds", when="build")
RUN_TOOL = MissingReport(what="setpriv", package="util-linux", purpose="confines", when="run")
UNUSABLE = {"usable": False, "accel": None, "reason": "broken\nin many ways", "fix": "repair it"}


def test_a_host_with_a_usable_driver_and_a_built_template_is_ready():
    ready, verdict, next_step = judge(QEMU, PYTHON, [], "python")
    assert (ready, next_step) == (True, None)
    assert verdict == "Ready: sandboxes run as microVMs (qemu, emulated CPU: many times slower)"


def test_a_built_template_needs_no_tools_for_building():
    assert judge(QEMU, PYTHON, [BUILD_TOOL], "python")[0]


def test_tools_for_building_are_named_before_the_build():
    unbuilt = PYTHON.model_copy(update={"built": False})
    assert judge(QEMU, unbuilt, [BUILD_TOOL], "python") == (
        False,
        "Not ready: mmdebstrap is not installed",
        "mcp-sandbox setup",
    )


def test_a_host_without_tools_for_running_is_not_ready():
    assert judge(QEMU, PYTHON, [BUILD_TOOL, RUN_TOOL], "python")[:2] == (
        False,
        "Not ready: setpriv is not installed",
    )


def test_an_unusable_driver_is_named_with_its_reason_and_fix():
    driver = QEMU.model_copy(update=UNUSABLE)
    assert judge(driver, PYTHON, [], "python") == (
        False,
        "Not ready: qemu does not work on this host: broken …",
        "repair it",
    )


def test_building_the_template_is_the_next_step():
    ready, _, next_step = judge(QEMU, PYTHON.model_copy(update={"built": False}), [], "python")
    assert (ready, next_step) == (False, "mcp-sandbox template build python")


def test_a_template_that_does_not_exist_is_named():
    assert judge(QEMU, None, [], "cobol")[1] == "Not ready: there is no template 'cobol'"


@pytest.mark.parametrize(("text", "line"), [("one", "one"), ("one\ntwo", "one …"), ("", ""), ("\n one \n", "one")])
def test_only_the_first_line_of_a_reason_is_shown(text: str, line: str):
    assert one_line(text) == line


class StubDrivers(app.Drivers):
    """Returns fixed probes instead of running drivers."""

    verdicts: ClassVar[dict[str, Probe]] = {
        "qemu": Probe(True, "emulation (TCG)", None, Accel.TCG, "QEMU 7.2"),
        "gvisor": Probe(True, "a program ran in it", version="runsc 20240729"),
        "bubblewrap": Probe(False, "bwrap is not installed", "apt-get install bubblewrap"),
    }

    async def probe(self, name: str) -> Probe:
        return self.verdicts.get(name) or await super().probe(name)

    def load(self, name: str) -> Driver:
        return FakeDriver() if name in self.verdicts else super().load(name)


@pytest.fixture(autouse=True)
def _drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_kvm(*_: object, **__: object) -> Verdict:
        return Verdict(False, "there is none", "another host")

    monkeypatch.setattr("vmm.probe.kvm", no_kvm)
    monkeypatch.setattr(doctor, "Drivers", StubDrivers)


async def test_the_report_has_the_choice_and_its_reasons(tmp_path: Path):
    report = await examine(Settings(home=tmp_path))
    assert report.choice.model_dump() == {
        "driver": "gvisor",
        "setting": "auto",
        "min_isolation": "namespace",
        "reasons": ["KVM: there is none"],
        "better": "another host",
    }


async def test_the_fix_of_a_driver_whose_programs_are_missing_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_sandbox.commands.setup.is_met", lambda need: need.what != "bwrap")
    report = await examine(Settings(home=tmp_path))
    fix = next(driver.fix for driver in report.drivers if driver.name == "bubblewrap")
    assert fix is not None
    assert "mcp-sandbox setup --driver bubblewrap" in fix
    assert "apt-get install -y --no-install-recommends bubblewrap" in fix
    assert "bwrap" not in {need.what for need in report.missing}  # the selected driver does not need it


async def test_a_host_whose_driver_is_too_weak_is_not_ready(tmp_path: Path):
    report = await examine(Settings(home=tmp_path, driver="gvisor", min_isolation=Isolation.VM))
    assert not report.ready
    assert report.verdict.startswith("Not ready: Driver gvisor has isolation level kernel")
    assert "lower min_isolation" in (report.next_step or "")
    assert {driver.name: driver.in_force for driver in report.drivers}["gvisor"]


async def test_a_host_without_any_build_gets_a_whole_report(tmp_path: Path):
    report = await examine(Settings(home=tmp_path / "home"))
    assert not report.ready
    assert {driver.name: driver.in_force for driver in report.drivers} == {
        "firecracker": False,
        "cloud-hypervisor": False,
        "qemu": False,
        "gvisor": True,
        "bubblewrap": False,
    }
    assert [template.built for template in report.templates if template.default] == [False]
    assert (report.guest_kernel, report.home.used_bytes) == (None, 0)
    assert report.home.free_bytes > 0
    assert 0 < report.host.memory_available_bytes <= report.host.memory_bytes
    assert not (tmp_path / "home").exists()  # examining creates nothing


async def test_an_unknown_driver_is_reported_and_not_raised(tmp_path: Path):
    report = await examine(Settings(home=tmp_path, driver="nonsense"))
    driver = report.drivers[-1]
    assert (driver.name, driver.usable, driver.fix) == (
        "nonsense",
        False,
        "choose one of: firecracker, cloud-hypervisor, qemu, gvisor, bubblewrap",
    )
    assert {template.built for template in report.templates} == {None}


async def test_the_json_keys_are_the_documented_ones(tmp_path: Path):
    report = json.loads((await examine(Settings(home=tmp_path))).model_dump_json())
    documented = {
        "version": None,
        "ready": None,
        "verdict": None,
        "next_step": None,
        "warnings": None,
        "choice": "driver setting min_isolation reasons better",
        "drivers": "name in_force usable isolation accel version program features reason fix missing_protections",
        "host": "user root cpus memory_bytes memory_available_bytes cgroup_version cgroup",
        "network": "modes allow_domains",
        "home": "path used_bytes free_bytes",
        "settings": None,
        "guest_kernel": None,
        "templates": "name title default built image_bytes snapshot_bytes stored_bytes memory_mb",
        "web": "providers problem",
        "servers": None,
        "missing": None,
    }
    assert list(report) == list(documented)
    for key, fields in documented.items():
        if fields:
            part = report[key][0] if isinstance(report[key], list) else report[key]
            assert list(part) == fields.split()


async def test_web_search_providers_are_listed_without_asking_them(tmp_path: Path):
    settings = Settings(home=tmp_path, web=WebSettings(brave_key="s3cret"))
    report = await examine(settings)
    assert [(p.name, p.answers, p.problem) for p in report.web.providers] == [
        ("brave", None, None),
        ("duckduckgo", None, None),
    ]
    assert "s3cret" not in report.model_dump_json()


async def test_the_report_lists_the_files_that_settings_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mcp-sandbox.toml").write_text('template = "python"\n')
    monkeypatch.chdir(tmp_path / "project")
    report = await examine(Settings(home=tmp_path))
    assert report.settings[0] == tmp_path / "project" / "mcp-sandbox.toml"
    doctor_view.show(report)
    assert re.search(r"settings +\S+/project/mcp-sandbox\.toml", capsys.readouterr().out)


async def test_the_verdict_comes_first_and_reasons_are_not_markup(tmp_path: Path, capsys):
    report = await examine(Settings(home=tmp_path))
    ready, verdict, next_step = judge(QEMU, PYTHON, [], "python")
    shown_report: Report = report.model_copy(
        update={
            "ready": ready,
            "verdict": verdict,
            "next_step": next_step,
            "drivers": [QEMU.model_copy(update={**UNUSABLE, "reason": "[bold]broken[/] here"})],
            "templates": [PYTHON],
            "missing": [BUILD_TOOL],
            "warnings": ["low on disk"],
        }
    )
    doctor_view.show(shown_report)
    shown = capsys.readouterr().out
    assert shown.startswith("✓ Ready: sandboxes run as microVMs")
    for text in ("[bold]broken[/] here", "repair it", "no host-side limits", "mmdebstrap", "low on disk", "200 MB"):
        assert text in shown


async def test_running_servers_are_reported_with_their_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = {"ready": 1, "starting": 0, "hits": 7, "misses": 2, "started": 10, "stopped": 0, "failed": 0}
    pool = {"template": "python-data-analysis", **numbers, "last_error": None}
    stats = {"pid": 4711, "uptime_s": 60.0, "sandboxes": 3, "machines": {}, "pools": [pool]}
    monkeypatch.setattr("mcp_sandbox.commands.doctor.ask_all", lambda settings, request: {object(): stats})
    [server] = (await examine(Settings(home=tmp_path))).servers
    assert (server.pid, server.sandboxes) == (4711, 3)
    assert [(pool.ready, pool.hits, pool.misses) for pool in server.pools] == [(1, 7, 2)]


@pytest.mark.parametrize("default", ["broken", "python-data-analysis"])
async def test_a_template_with_errors_is_reported_and_does_not_affect_others(tmp_path: Path, default: str):
    file = tmp_path / "templates" / "broken" / "template.toml"
    file.parent.mkdir(parents=True)
    file.write_text("title =")
    report = await examine(Settings(home=tmp_path, template_path=(tmp_path / "templates",), template=default))
    assert "python-data-analysis" in [template.name for template in report.templates]
    assert [warning for warning in report.warnings if f"{file}:1: this is not valid TOML" in warning]
    assert (report.verdict == "Not ready: template broken has errors") == (default == "broken")


async def test_the_network_modes_that_sandboxes_can_ask_for_are_reported(tmp_path: Path, capsys):
    report = await examine(Settings(home=tmp_path))
    assert report.network.modes == ["none"]
    doctor_view.show(report)
    assert "sandboxes are offline" in capsys.readouterr().out
    enabled = Settings.model_validate({"home": tmp_path, "network": {"allow_domains": ["pypi.org"]}})
    report = await examine(enabled)
    assert (report.network.modes, report.network.allow_domains) == (["none", "proxy"], ["pypi.org"])
    doctor_view.show(report)
    assert "none; proxy (to pypi.org)" in capsys.readouterr().out
