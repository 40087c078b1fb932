"""What the doctor concludes from what it finds, and how it says it."""

import json
from pathlib import Path

import pytest

from mcp_sandbox.commands import doctor_view
from mcp_sandbox.commands.doctor import DriverReport, MissingReport, Report, TemplateReport, examine, judge, one_line
from mcp_sandbox.config import Settings

QEMU = DriverReport(
    name="qemu",
    in_force=True,
    usable=True,
    isolation="vm",
    accel="tcg",
    version="QEMU 7.2",
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
UNUSABLE = {"usable": False, "accel": None, "reason": "broken\nin many ways", "fix": "mend it"}


def test_a_usable_driver_and_a_built_template_are_all_it_takes():
    ready, verdict, next_step = judge(QEMU, PYTHON, [], "python")
    assert (ready, next_step) == (True, None)
    assert verdict == "Ready: sandboxes run as microVMs (qemu, emulated CPU: 16 to 27 times slower)"


def test_tools_for_building_are_not_missed_once_the_template_is_built():
    assert judge(QEMU, PYTHON, [BUILD_TOOL], "python")[0]


def test_tools_for_building_come_before_the_building():
    unbuilt = PYTHON.model_copy(update={"built": False})
    assert judge(QEMU, unbuilt, [BUILD_TOOL], "python") == (
        False,
        "Not ready: mmdebstrap is not installed",
        "mcp-sandbox setup",
    )


def test_nothing_runs_without_the_tools_for_running():
    assert judge(QEMU, PYTHON, [BUILD_TOOL, RUN_TOOL], "python")[:2] == (
        False,
        "Not ready: setpriv is not installed",
    )


def test_an_unusable_driver_is_named_with_its_reason_and_fix():
    driver = QEMU.model_copy(update=UNUSABLE)
    assert judge(driver, PYTHON, [], "python") == (
        False,
        "Not ready: qemu cannot run machines here: broken …",
        "mend it",
    )


def test_a_template_that_is_not_built_is_the_next_step():
    ready, _, next_step = judge(QEMU, PYTHON.model_copy(update={"built": False}), [], "python")
    assert (ready, next_step) == (False, "mcp-sandbox template build python")


def test_a_template_that_does_not_exist_is_named():
    assert judge(QEMU, None, [], "cobol")[1] == "Not ready: there is no template 'cobol'"


@pytest.mark.parametrize(("text", "line"), [("one", "one"), ("one\ntwo", "one …"), ("", ""), ("\n one \n", "one")])
def test_a_reason_is_cut_to_its_first_line(text: str, line: str):
    assert one_line(text) == line


async def test_a_host_on_which_nothing_was_built_gets_a_whole_report(tmp_path: Path):
    report = await examine(Settings(home=tmp_path / "home"))
    assert not report.ready
    assert {driver.name: driver.in_force for driver in report.drivers} == {"qemu": True}
    assert [(template.built, template.default) for template in report.templates] == [(False, True)]
    assert (report.guest_kernel, report.home.used_bytes) == (None, 0)
    assert report.home.free_bytes > 0
    assert 0 < report.host.memory_available_bytes <= report.host.memory_bytes
    assert not (tmp_path / "home").exists()  # it only looks


async def test_a_driver_that_does_not_exist_is_reported_and_not_raised(tmp_path: Path):
    report = await examine(Settings(home=tmp_path, driver="nonsense"))
    driver = report.drivers[-1]
    assert (driver.name, driver.usable, driver.fix) == ("nonsense", False, "choose one of: qemu")
    assert [template.built for template in report.templates] == [None]


async def test_the_json_keys_are_the_documented_ones(tmp_path: Path):
    report = json.loads((await examine(Settings(home=tmp_path))).model_dump_json())
    documented = {
        "version": None,
        "ready": None,
        "verdict": None,
        "next_step": None,
        "warnings": None,
        "drivers": "name in_force usable isolation accel version reason fix missing_protections",
        "host": "user root cpus memory_bytes memory_available_bytes cgroup_version cgroup",
        "home": "path used_bytes free_bytes",
        "guest_kernel": None,
        "templates": "name title default built image_bytes snapshot_bytes stored_bytes memory_mb",
        "missing": None,
    }
    assert list(report) == list(documented)
    for key, fields in documented.items():
        if fields:
            part = report[key][0] if isinstance(report[key], list) else report[key]
            assert list(part) == fields.split()


async def test_the_verdict_comes_first_and_nothing_is_read_as_markup(tmp_path: Path, capsys):
    report = await examine(Settings(home=tmp_path))
    ready, verdict, next_step = judge(QEMU, PYTHON, [], "python")
    told: Report = report.model_copy(
        update={
            "ready": ready,
            "verdict": verdict,
            "next_step": next_step,
            "drivers": [QEMU.model_copy(update={**UNUSABLE, "reason": "[bold]broken[/] here"})],
            "templates": [PYTHON],
            "missing": [BUILD_TOOL],
            "warnings": ["little room"],
        }
    )
    doctor_view.show(told)
    shown = capsys.readouterr().out
    assert shown.startswith("✓ Ready: sandboxes run as microVMs")
    for text in ("[bold]broken[/] here", "mend it", "no host-side limits", "mmdebstrap", "little room", "200 MB"):
        assert text in shown
