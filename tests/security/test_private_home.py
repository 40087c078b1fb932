"""The home is closed to other users, and nothing that they, or a repository, have planted is run."""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mcp_sandbox.commands.common import SERVER_ARGS
from templates.program import path_in, program_inputs
from templates.store import Store, key_of
from tests.functional.ordinary_user import BASE, ordinary_user
from tests.session import current
from vmm.driver import DriverConfig, load_driver
from vmm.drivers.gvisor import RUNSC
from vmm.errors import DriverUnavailable, Untrusted
from vmm.memory import load_sealed
from vmm.types import GuestCode, MachineSpec

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
SOMEBODY = 1_900_000_001
COMMAND = (sys.executable, *SERVER_ARGS)
# Machines of root run as other users, who open these files again through descriptors that they are given.
MACHINES_READ = {"checkpoint.img", "pages.img", "pages_meta.img"}


def run(
    argv: Sequence[str], cwd: Path, home: Path | None = None, umask: int = 0o022
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a directory."""
    environment = {name: value for name, value in os.environ.items() if name != "MCP_SANDBOX_HOME"}
    if home is not None:
        environment["MCP_SANDBOX_HOME"] = str(home)
    command = [*COMMAND, *argv]
    return subprocess.run(command, cwd=cwd, env=environment, umask=umask, input="1+1", capture_output=True, text=True)


def plant_runsc(home: Path) -> tuple[Path, Path]:
    """Put a program into a home in place of gVisor; return it and the file that shows that it was run."""
    mark = home.parent / "was-run"
    folder = home / "program" / key_of(program_inputs(RUNSC))
    folder.mkdir(parents=True)
    program = folder / "runsc"
    program.write_text(f"#!/bin/sh\ntouch {mark}\necho 'runsc version 0.0~20240729.0'\n")
    program.chmod(0o755)
    meta = '{"id": "x", "inputs": {}, "details": {}, "made": "2026-01-01T00:00:00", "size_bytes": 1}'
    (folder / "meta.json").write_text(meta)
    return program, mark


async def probe_gvisor(runsc: Path) -> str:
    """Probe gVisor with a program of the home; return what is wrong with it."""
    return (await load_driver("gvisor", DriverConfig(runsc.parent, runsc.parent, program=runsc)).probe()).reason


async def test_a_program_of_the_users_own_home_is_run(tmp_path: Path):
    """The tests below do not pass because the program is never run."""
    program, mark = plant_runsc(tmp_path / "home")
    await probe_gvisor(program)
    assert mark.exists()


def test_a_repository_cannot_name_a_home_with_a_program(tmp_path: Path):
    _, mark = plant_runsc(tmp_path / "repository" / "h")
    (tmp_path / "repository" / "mcp-sandbox.toml").write_text('home = "h"\n')
    refused = run(["--driver", "gvisor", "doctor"], tmp_path / "repository")
    assert refused.returncode == 2
    assert "a project may not set 'home'" in refused.stderr
    assert not mark.exists()


def test_a_module_of_the_working_directory_is_not_imported_by_servers_that_we_start(tmp_path: Path):
    (tmp_path / "mcp_sandbox.py").write_text("raise SystemExit('planted')\n")
    (tmp_path / "anyio.py").write_text("raise SystemExit('planted')\n")
    command = [sys.executable, *SERVER_ARGS, "--version"]
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE).returncode == 0


@pytest.mark.parametrize("up", range(4))
async def test_a_program_that_others_could_have_planted_is_not_run(tmp_path: Path, up: int):
    program, mark = plant_runsc(tmp_path / "home")
    weak = (program, *program.parents)[up]
    weak.chmod(0o777)
    assert f"{weak} can be changed by other users; " in await probe_gvisor(program)
    assert not mark.exists()


@AS_ROOT
@pytest.mark.parametrize("up", range(4))
async def test_a_program_of_another_user_is_not_run(tmp_path: Path, up: int):
    program, mark = plant_runsc(tmp_path / "home")
    planted = (program, *program.parents)[up]
    os.chown(planted, SOMEBODY, SOMEBODY)
    assert f"{planted} belongs to another user, {SOMEBODY}; " in await probe_gvisor(program)
    assert not mark.exists()


def test_a_home_that_others_could_write_to_is_refused(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    refused = run(["template", "list"], tmp_path, home)
    assert refused.returncode == 2
    assert f"{home} can be changed by other users" in refused.stderr
    assert f"chmod go-w {home}" in refused.stderr


@pytest.mark.parametrize("driver", ["gvisor", "bubblewrap"])
async def test_no_machine_starts_from_files_that_others_could_have_planted(driver: str, tmp_path: Path):
    root, code = tmp_path / "root", tmp_path / "agent.tar"
    root.mkdir() if driver == "bubblewrap" else root.touch()
    code.touch()
    root.chmod(0o777)
    spec = MachineSpec("planted", root, GuestCode(code), memory_mb=64, vcpus=1, disk_mb=16)
    runsc = Store(current().developer).find("program", program_inputs(RUNSC)) if driver == "gvisor" else None
    config = DriverConfig(tmp_path, tmp_path, program=path_in(runsc, RUNSC) if runsc else None)
    try:
        with pytest.raises(Untrusted, match="can be changed by other users"):
            async with load_driver(driver, config).launch(spec):
                pass
    except DriverUnavailable as error:
        pytest.skip(str(error))


def test_no_memory_is_loaded_that_others_could_have_planted(tmp_path: Path):
    (tmp_path / "memory").write_bytes(b"x" * 4096)
    os.close(load_sealed(tmp_path / "memory", 4096))
    (tmp_path / "memory").chmod(0o666)
    with pytest.raises(Untrusted):
        load_sealed(tmp_path / "memory", 4096)


@pytest.mark.parametrize("mode", [0o755, 0o710])
def test_a_home_that_others_could_read_is_closed_and_the_user_is_told(tmp_path: Path, mode: int):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(mode)
    listed = run(["template", "list"], tmp_path, home)
    assert (listed.returncode, home.stat().st_mode & 0o777) == (0, 0o700)
    assert f"other users could read {home}" in listed.stderr
    assert "other users" not in run(["template", "list"], tmp_path, home).stderr


@AS_ROOT
def test_another_user_can_neither_read_nor_lock_a_home():
    lock = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    with ordinary_user() as user, TemporaryDirectory(dir=BASE) as name:
        home = Path(name)
        home.chmod(0o755)
        become = ("setpriv", f"--reuid={user.uid}", f"--regid={user.uid}", "--clear-groups")
        argv = [*become, "/usr/bin/python3", "-c", lock, name]
        assert subprocess.run(argv, stderr=subprocess.PIPE, text=True).stderr == ""
        assert run(["template", "list"], Path("/"), home, umask=0).returncode == 0
        assert "PermissionError" in subprocess.run(argv, stderr=subprocess.PIPE, text=True).stderr


@pytest.mark.vm
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_everything_in_a_home_is_private_whatever_the_umask(umask: int, tmp_path: Path):
    home = current().new_home(f"umask-{secrets.token_hex(4)}", {"image", "program"})  # another one for a second try
    home.chmod(0o700)
    before = set(home.rglob("*"))
    built = run(["--driver", "gvisor", "template", "build"], tmp_path, home, umask)
    assert built.returncode == 0, built.stderr
    ran = run(["--driver", "gvisor", "run", "-"], tmp_path, home, umask)
    assert ran.returncode == 0, ran.stderr
    made = set(home.rglob("*")) - before
    assert {"agent.tar", "meta.json", "registry.db", *MACHINES_READ} <= {path.name for path in made}
    open_to_others = [path for path in made if path.lstat().st_mode & 0o077 and path.name not in MACHINES_READ]
    assert open_to_others == []
    assert not [path for path in made if path.lstat().st_mode & 0o022]


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_a_new_template_has_the_users_own_modes(umask: int, tmp_path: Path):
    """It belongs to the user's files, perhaps in a repository, and not to the home."""
    made = run(["template", "init", "mine", "--dir", str(tmp_path / "t")], tmp_path, tmp_path / "home", umask)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "t" / "mine" / "template.toml").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_template_that_others_could_write_is_an_error(tmp_path: Path):
    run(["template", "init", "mine", "--dir", str(tmp_path / "t")], tmp_path, tmp_path / "home")
    (tmp_path / "t" / "mine").chmod(0o777)
    shown = run(["--template-path", str(tmp_path / "t"), "template", "show", "mine"], tmp_path, tmp_path / "home")
    assert shown.returncode != 0
    assert "can be changed by other users" in shown.stdout + shown.stderr
