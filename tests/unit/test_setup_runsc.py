"""`mcp-sandbox setup --runsc`: which gVisor is accepted, and which one is used afterwards."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trustme
from anyio.abc import ByteStream
from typer.testing import CliRunner

from mcp_sandbox.app import Drivers
from mcp_sandbox.cli import app
from mcp_sandbox.commands.setup_runsc import WantedRunsc, install_runsc
from mcp_sandbox.config import Settings
from mcp_sandbox.stdio_command import EXIT_USAGE
from templates import chosen_program
from templates.errors import BuildFailed
from templates.program import program_inputs
from templates.store import Store
from tests.unit.fake_runsc import NEW, OF_2022, fake_runsc
from tests.web.sites import head_of, serving_tls
from vmm.driver import DriverConfig
from vmm.drivers.gvisor import RUNSC, probe
from vmm.errors import DriverUnavailable

HOST = "localhost"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.fixture(autouse=True)
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The gVisors that were tried. A program runs in each."""
    tried: list[Path] = []

    async def run(_config: DriverConfig, binary: Path, _platform: str) -> None:
        tried.append(binary)

    monkeypatch.setattr(probe, "_try", run)
    return tried


@pytest.fixture
def runsc(tmp_path: Path) -> Path:
    return fake_runsc(tmp_path / "release", "release-20260105.0", NEW)


def sha512(file: Path) -> str:
    return hashlib.sha512(file.read_bytes()).hexdigest()


async def in_use(settings: Settings) -> Path | None:
    async with Drivers(settings) as drivers:
        return drivers.builder.find_program(RUNSC)


# -- what is refused before anything happens ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--runsc", "/tmp/runsc"], "sha512sum /tmp/runsc"),
        (["--runsc", "https://gvisor.test/runsc"], "curl -fsSL https://gvisor.test/runsc.sha512"),
        (["--runsc", "https://gvisor.test/runsc", "--sha512", "abc"], "128 hexadecimal digits"),
        (["--runsc", "http://gvisor.test/runsc", "--sha512", "a" * 128], "only https:// addresses and paths"),
        (["--runsc", "none", "--sha512", "a" * 128], "not to --runsc none"),
        (["--runsc", "none", "--check"], "Leave out --runsc, or --check"),
        (["--sha512", "a" * 128], "belongs to --runsc"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(options: list[str], said: str):
    result = CliRunner().invoke(app, ["setup", *options])
    assert result.exit_code == EXIT_USAGE
    assert said in result.stderr


def test_a_runsc_of_the_settings_has_to_go_first(tmp_path):
    with pytest.raises(ValueError, match="Remove it first"):
        WantedRunsc.parse(Settings(runsc=tmp_path / "runsc"), "none", None, check=False)


# -- from a path -------------------------------------------------------------------------------------------


async def test_a_runsc_with_the_right_checksum_is_used_from_now_on(settings, runsc, tries, capsys):
    wanted = WantedRunsc.parse(settings, str(runsc), sha512(runsc).upper(), check=False)
    await install_runsc(settings, wanted)
    used = await in_use(settings)
    assert used is not None
    assert used.read_bytes() == runsc.read_bytes()
    assert used.is_relative_to(settings.home)
    assert used.stat().st_mode & 0o777 == 0o755
    assert tries == [used]
    printed = capsys.readouterr().out
    assert "runsc 20260105" in printed
    assert "template build" in printed


async def test_a_runsc_with_another_checksum_is_refused_and_leaves_nothing(settings, runsc, tries):
    with pytest.raises(BuildFailed, match=f"its SHA-512 is {sha512(runsc)}, not {'a' * 128}"):
        await install_runsc(settings, WantedRunsc(str(runsc), "a" * 128))
    assert (await in_use(settings), tries) == (None, [])
    assert Store(settings.home).entries() == []


async def test_a_runsc_that_is_missing_is_named(settings, tmp_path):
    with pytest.raises(BuildFailed, match=str(tmp_path / "missing")):
        await install_runsc(settings, WantedRunsc(str(tmp_path / "missing"), "a" * 128))


async def test_a_runsc_that_is_too_old_is_refused_although_the_path_has_a_good_one(
    settings, runsc, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(runsc.parent), prepend=":")
    old = fake_runsc(tmp_path / "old", "release-20220101.0", OF_2022)
    with pytest.raises(DriverUnavailable, match="too old"):
        await install_runsc(settings, WantedRunsc(str(old), sha512(old)))
    assert await in_use(settings) is None


async def test_nothing_takes_the_place_of_a_chosen_runsc_that_is_gone(settings, runsc, monkeypatch):
    await install_runsc(settings, WantedRunsc(str(runsc), sha512(runsc)))
    used = await in_use(settings)
    assert used is not None
    monkeypatch.setenv("PATH", str(runsc.parent), prepend=":")
    used.parent.rename(settings.home / "elsewhere")
    async with Drivers(settings) as drivers:
        verdict = await drivers.probe("gvisor")
    assert (verdict.usable, verdict.fix) == (False, probe.NO_CHOICE)


async def test_a_runsc_that_does_not_work_here_is_not_used(settings, runsc, tmp_path):
    await install_runsc(settings, WantedRunsc(str(runsc), sha512(runsc)))
    before = await in_use(settings)
    old = fake_runsc(tmp_path / "old", "release-20221219.0", OF_2022)
    with pytest.raises(DriverUnavailable, match=r"was not installed: .*too old"):
        await install_runsc(settings, WantedRunsc(str(old), sha512(old)))
    assert await in_use(settings) == before
    assert len(Store(settings.home).entries()) == 1


async def test_setup_goes_back_to_the_runsc_of_debian(settings, runsc):
    async def debians(staging: Path) -> dict[str, str]:
        fake_runsc(staging)
        return {"package": "runsc_1_amd64"}

    entry = await Store(settings.home).obtain("program", program_inputs(RUNSC), debians)
    await install_runsc(settings, WantedRunsc(str(runsc), sha512(runsc)))
    assert await in_use(settings) != entry.path / "runsc"
    await install_runsc(settings, WantedRunsc("none"))
    assert await in_use(settings) == entry.path / "runsc"


async def test_the_chosen_runsc_is_not_pruned(settings, runsc):
    await install_runsc(settings, WantedRunsc(str(runsc), sha512(runsc)))
    async with Drivers(settings) as drivers:
        assert await drivers.builder.unused([]) == []
        drivers.builder.chosen.choose(RUNSC, None)
        assert [entry.kind for entry in await drivers.builder.unused([])] == ["program"]


# -- from a server -----------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, head: str = "200 OK"
) -> AsyncIterator[str]:
    """Serve a body over https; yields its address, whose certificate is trusted."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    async def answer(stream: ByteStream) -> None:
        await head_of(stream)
        with anyio.move_on_after(5):  # the client leaves once it has seen enough
            await stream.send(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async with serving_tls(authority, HOST, answer) as port:
        yield f"https://{HOST}:{port}/runsc"


async def test_a_runsc_is_downloaded_over_https(settings, runsc, tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, runsc.read_bytes()) as address:
        await install_runsc(settings, WantedRunsc(address, sha512(runsc)))
    used = await in_use(settings)
    assert used is not None
    assert used.read_bytes() == runsc.read_bytes()


async def test_a_download_with_another_checksum_is_refused(settings, runsc, tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, runsc.read_bytes() + b"\n") as address:
        with pytest.raises(BuildFailed, match="Nothing was installed"):
            await install_runsc(settings, WantedRunsc(address, sha512(runsc)))
    assert await in_use(settings) is None


async def test_a_download_that_is_too_large_is_cut_off(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(chosen_program, "MAX_BYTES", 1000)
    async with serving(tmp_path, monkeypatch, b"x" * 5000) as address:
        with pytest.raises(BuildFailed, match="more than"):
            await install_runsc(settings, WantedRunsc(address, "a" * 128))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("404 Not Found", "the server answered 404"),
        ("302 Found\r\nLocation: http://localhost:9/runsc", "not an https address"),
    ],
)
async def test_a_server_that_has_no_runsc_is_an_error(settings, tmp_path, monkeypatch, head, said):
    async with serving(tmp_path, monkeypatch, b"", head) as address:
        with pytest.raises(BuildFailed, match=said):
            await install_runsc(settings, WantedRunsc(address, "a" * 128))


async def test_a_server_with_an_unknown_certificate_is_an_error(settings, tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, b"") as address:
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(BuildFailed, match="cannot be downloaded"):
            await install_runsc(settings, WantedRunsc(address, "a" * 128))
