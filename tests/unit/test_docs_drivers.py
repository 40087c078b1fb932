"""What the documents say about drivers, modules, commands and metrics matches the code."""

import re
import tomllib
from pathlib import Path

import pytest
import typer

from mcp_sandbox.cli import app
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.metrics import Metrics
from templates.catalogue import Catalogue
from tests.unit.test_docs import ROOT, text_of
from vmm.driver import DRIVERS, driver_infos
from vmm.drivers.bubblewrap import driver as bubblewrap
from vmm.drivers.gvisor import driver as gvisor
from vmm.drivers.qemu import driver as qemu
from vmm.microvm import driver as microvm
from vmm.types import GuestCode, MachineSpec

MIB = 1024 * 1024
CAPABILITIES = {info.name: info.capabilities for info in driver_infos()}
LIMITS = {
    "firecracker": microvm.machine_limits,
    "cloud-hypervisor": microvm.machine_limits,
    "qemu": qemu._limits,
    "gvisor": gvisor._limits,
    "bubblewrap": bubblewrap._limits,
}


def section(document: str, title: str) -> str:
    """Return the text below a heading, up to the next one of the same level."""
    rank = title.partition(" ")[0]
    return text_of(document).split(f"\n{title}\n")[1].split(f"\n{rank} ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the rows of all tables as cells, without headers."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return [cells for cells in lines if cells[0].startswith("`")]


def named_in(text: str) -> set[str]:
    """Return everything that is set as code."""
    return set(re.findall(r"`([^`]+)`", text))


def test_these_tests_cover_all_drivers():
    assert set(LIMITS) == set(DRIVERS)


def test_the_capabilities_of_every_driver_are_documented():
    table = {cells[0].strip("`"): cells[1:5] for cells in rows(section("docs/architecture.md", "## Two contracts"))}
    assert table == {
        name: [
            f"`{can.isolation}`",
            f"`{can.root}`",
            "kernel and initramfs" if can.boots_kernel else "the agent's code",
            "yes" if can.snapshot else "no",
        ]
        for name, can in CAPABILITIES.items()
    }


def test_what_every_driver_needs_of_the_store_is_documented():
    table = {
        cells[0].strip("`"): named_in(cells[1]) for cells in rows(section("docs/operations.md", "## Where state lives"))
    }
    for name, can in CAPABILITIES.items():
        boot = {"kernel", "initramfs"} if can.boots_kernel else {"agent"}
        expected = {"image", can.root, *boot, *(["snapshot"] if can.snapshot else [])}
        assert table[name] - {"program"} == expected, name


def test_the_limits_of_a_machine_are_documented():
    size = Catalogue().load(Settings().template).machine
    spec = MachineSpec("m", Path("/"), GuestCode(Path("/")), size.memory_mb, size.vcpus, size.disk_mb)
    text = section("docs/operations.md", "## Limits on a machine")
    assert f"(`memory_mb` {size.memory_mb}, `vcpus` {size.vcpus}, `disk_mb` {size.disk_mb})" in text
    expected = []
    for name in DRIVERS:
        limits = LIMITS[name](spec)
        assert limits.memory_bytes is not None
        expected.append([f"`{name}`", f"{limits.memory_bytes // MIB} MB", f"{limits.cpus:g}", str(limits.pids)])
    assert rows(text) == expected


@pytest.mark.parametrize("document", ["README.md", "docs/operations.md"])
def test_every_driver_is_in_the_tables_of_isolation_levels(document: str):
    drivers = "|".join(DRIVERS)
    lines = [
        line for line in text_of(document).splitlines() if line.startswith("|") and re.search(rf"`({drivers})`", line)
    ]
    for name, can in CAPABILITIES.items():
        assert any(f"`{name}`" in line and f"`{can.isolation}`" in line for line in lines), name


def test_the_threat_model_has_a_section_for_every_driver():
    titles = re.findall(r"^## `([\w-]+)`", text_of("docs/threat-model.md"), re.MULTILINE)
    assert titles == list(DRIVERS)


@pytest.mark.parametrize("folder", ["machines", "runs", "sandboxes", "operating", "rest", "serving"])
def test_every_module_of_the_product_is_in_its_folders_row(folder: str):
    line = next(line for line in text_of("docs/architecture.md").splitlines() if line.startswith(f"| `{folder}` |"))
    there = {path.stem for path in (ROOT / "mcp_sandbox" / folder).glob("[a-z]*.py")}
    assert named_in(line) - {folder} == there


@pytest.mark.parametrize("room", ["vmm", "guest", "templates", "websearch", "mcp_sandbox"])
def test_every_module_is_in_its_rooms_row_and_every_one_named_is_there(room: str):
    line = next(line for line in text_of("docs/architecture.md").splitlines() if line.startswith(f"| `{room}` |"))
    there = {path.stem for path in (ROOT / room).glob("[a-z]*.py")}
    there |= {f"{path.parent.name}/" for path in (ROOT / room).glob("*/__init__.py")}
    assert named_in(line) - {room} == there


def test_every_command_is_in_the_table_of_commands():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = section("docs/operations.md", "## Commands")
    for name, command in commands.items():
        for subcommand in getattr(command, "commands", {"": None}):
            assert f"`{subcommand}`" in text or f"mcp-sandbox {name} {subcommand}".strip() in text, (name, subcommand)


def test_every_metric_is_documented_and_every_one_documented_is_there():
    exported = re.findall(r"^# TYPE (\w+) ", Metrics(tuple).text(), re.MULTILINE)
    documented = [cells[0].strip("`") for cells in rows(section("docs/operations.md", "## Metrics"))]
    assert sorted(documented) == sorted(exported)


def test_every_library_we_depend_on_has_its_reason():
    wanted = tomllib.loads(text_of("pyproject.toml"))["project"]["dependencies"]
    libraries = {re.split(r"[<>=]", wish)[0] for wish in wanted}
    table = section("docs/architecture.md", "## Libraries")
    assert libraries <= {
        name for line in table.splitlines() for name in named_in(line.split("|")[1] if "|" in line else "")
    }
