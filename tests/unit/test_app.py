"""How the parts are assembled around the chosen driver."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from mcp_sandbox import app
from mcp_sandbox.app import Drivers, open_host, open_service
from mcp_sandbox.config import Settings
from mcp_sandbox.machines.provider import HostFacts
from mcp_sandbox.serving.stdio_server import open_server
from templates.chosen_program import ChosenPrograms
from tests.unit.fake_driver import FakeDriver
from vmm.driver import DriverConfig
from vmm.drivers.gvisor import RUNSC
from vmm.types import Accel, Capabilities, Download, Isolation, Probe, Program

if TYPE_CHECKING:
    from templates.build import Builder


class StubDriver(FakeDriver):
    """A driver that works once it has a gVisor."""

    name = "gvisor"
    capabilities = Capabilities(isolation=Isolation.KERNEL, snapshot=True)

    def __init__(self, config: DriverConfig) -> None:
        super().__init__()
        self.config = config
        self.closed = False

    async def probe(self) -> Probe:
        if self.config.program is None:
            return Probe(False, "runsc is not installed", "mcp-sandbox setup", lacks=RUNSC)
        return Probe(True, "a program ran in it", version="runsc 20240729", missing_protections=("no cgroups",))

    async def aclose(self) -> None:
        self.closed = True


class WeakDriver(StubDriver):
    name = "bubblewrap"
    capabilities = Capabilities(isolation=Isolation.NAMESPACE, snapshot=False)

    async def probe(self) -> Probe:
        return Probe(True, "a program ran", missing_protections=("machines share the host's kernel", "no cgroups"))


class StubBuilder:
    """A builder that has no gVisor until it fetches one."""

    def __init__(self) -> None:
        self.program: Path | None = None
        self.fetched: list[Download] = []
        self.chosen = ChosenPrograms(Path("/nonexistent"))

    def find_kernel(self) -> None: ...

    def find_program(self, wanted: Program) -> Path | None:
        return self.program

    async def fetch(self, what: Download) -> None:
        self.fetched.append(what)
        self.program = Path("runsc")


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> StubBuilder:
    builder = StubBuilder()
    monkeypatch.setattr(app, "make_builder", lambda *_: (None, cast("Builder", builder)))
    return builder


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[StubDriver]:
    """All loaded drivers, in order."""
    drivers: list[StubDriver] = []

    def load(name: str, config: DriverConfig) -> StubDriver:
        drivers.append({"gvisor": StubDriver, "bubblewrap": WeakDriver}[name](config))
        return drivers[-1]

    monkeypatch.setattr(app, "load_driver", load)
    return drivers


async def test_a_driver_is_probed_again_after_a_fetch(builder: StubBuilder, loaded: list[StubDriver]):
    async with open_host(Settings(driver="gvisor"), fetch=True) as host:
        assert host.choice.verdict.usable
        assert host.facts == HostFacts("gvisor", Isolation.KERNEL, None, ("no cgroups",))
        assert host.driver is loaded[1]
        assert [driver.closed for driver in loaded] == [True, False]
    assert builder.fetched == [RUNSC]
    assert [driver.closed for driver in loaded] == [True, True]


async def test_nothing_is_fetched_for_a_driver_that_works(builder: StubBuilder, loaded: list[StubDriver]):
    builder.program = Path("runsc")
    async with open_host(Settings(driver="gvisor"), fetch=True) as host:
        assert host.choice.verdict.usable
    assert (builder.fetched, len(loaded)) == ([], 1)


@pytest.mark.usefixtures("builder")
async def test_a_driver_gets_the_program_that_the_operator_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen: dict[str, Path | None] = {}

    def load(name: str, config: DriverConfig) -> StubDriver:
        chosen[name] = config.binary
        return StubDriver(config)

    monkeypatch.setattr(app, "load_driver", load)
    settings = Settings(firecracker=tmp_path / "fc", cloud_hypervisor=tmp_path / "ch", runsc=tmp_path / "runsc")
    async with Drivers(settings) as drivers:
        for name in ("firecracker", "cloud-hypervisor", "gvisor", "qemu"):
            drivers.load(name)
    programs = {"firecracker": tmp_path / "fc", "cloud-hypervisor": tmp_path / "ch", "gvisor": tmp_path / "runsc"}
    assert chosen == programs | {"qemu": None}


@pytest.mark.usefixtures("loaded")
async def test_a_probe_fetches_nothing(builder: StubBuilder):
    async with Drivers(Settings()) as drivers:
        assert (await drivers.probe("gvisor")).lacks is RUNSC
    assert builder.fetched == []


@pytest.mark.usefixtures("builder", "loaded")
async def test_the_weakest_driver_warns_once(capsys: pytest.CaptureFixture[str]):
    async with open_host(Settings(driver="bubblewrap")):
        pass
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("bubblewrap") == printed.err.count("\n") == 1
    for words in ("weakest", "machines share the host's kernel", "no cgroups"):
        assert words in printed.err


@pytest.mark.usefixtures("loaded")
async def test_stronger_drivers_do_not_warn(builder: StubBuilder, capsys: pytest.CaptureFixture[str]):
    builder.program = Path("runsc")
    async with open_host(Settings(driver="gvisor")):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("builder", "loaded")
async def test_a_server_on_an_unready_host_gives_the_reason_and_the_fix():
    async with open_server(Settings(driver="gvisor")) as unusable:
        [text] = [tool.description for tool in await unusable.list_tools() if tool.name == "create_sandbox"]
        assert text is not None
        assert (
            "cannot start sandboxes: runsc is not installed. To fix it: mcp-sandbox setup, then restart this server."
            in text
        )


@pytest.mark.usefixtures("builder", "loaded")
async def test_errors_in_templates_are_logged_by_servers_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "template.toml").write_text("colour = 3\n")
    settings = Settings(driver="gvisor", home=tmp_path / "home", template_path=(tmp_path,))
    async with open_host(settings) as host, open_service(host, pooled=False):
        assert "mine" not in caplog.text, "a command that uses another template"
    async with open_server(settings):
        assert "template mine has errors" in caplog.text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            HostFacts("gvisor", Isolation.KERNEL, None),
            "kernel (gVisor, native CPU): "
            "every sandbox has an application kernel between its code and the host's kernel",
        ),
        (
            HostFacts("qemu", Isolation.VM, Accel.KVM, ("this", "that")),
            "vm (QEMU, KVM): every sandbox is a virtual machine with its own kernel; not in force: this; that",
        ),
    ],
    ids=lambda value: value.driver if isinstance(value, HostFacts) else "",
)
def test_the_isolation_is_described(facts: HostFacts, words: str):
    assert str(facts) == words


def test_isolation_levels_are_ordered():
    strongest_first = [Isolation.VM, Isolation.KERNEL, Isolation.NAMESPACE]
    for place, level in enumerate(strongest_first):
        assert [level.at_least(other) for other in strongest_first] == [rank >= place for rank in range(3)]


def test_a_server_on_stdio_does_not_import_what_only_http_needs():
    code = """
import sys
from mcp_sandbox.serving.stdio_server import NOT_NEEDED, left_out
with left_out(*NOT_NEEDED):
    from mcp_sandbox.serving.server import create_server
    from mcp_sandbox.config import load_settings
    create_server(load_settings(), "", lambda: None)
print({"uvicorn.server", "rich.console"} & {*sys.modules})
import uvicorn.main, rich.console  # as anything else may
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
