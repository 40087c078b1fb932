"""Machines of the bubblewrap driver for tests: a tree made from this host's Python, and an agent of a few lines."""

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.waiting import HANG_S
from vmm.agent import PYTHON
from vmm.driver import DriverConfig
from vmm.drivers.bubblewrap.driver import BubblewrapDriver
from vmm.machine import StdioMachine
from vmm.types import GuestCode, MachineSpec

MAX_ANSWER = 1024 * 1024
SIZE = {"memory_mb": 64, "vcpus": 1, "disk_mb": 8}

# Runs each line it receives, a JSON string of code, and answers with a line: what the code printed.
AGENT = """
import contextlib, io, json, sys, traceback
names = {}
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(json.loads(line), names)
        except BaseException:
            traceback.print_exc(file=out)
    print(json.dumps(out.getvalue().strip()), flush=True)
"""


def make_tree(tree: Path) -> Path:
    """Make a root file system with a shell, Python, numpy and the directories that every machine has."""
    for place in ("usr/bin", "proc", "dev", "sys", "run", "tmp", "var/tmp", "workspace", "etc"):
        (tree / place).mkdir(parents=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    python, library = prefix / "bin" / version, prefix / "lib" / version
    unwanted = shutil.ignore_patterns("__pycache__", "test", "tests", "site-packages", "dist-packages", "config-*")
    inside = tree / library.relative_to("/")
    shutil.copytree(library, inside, ignore=unwanted, symlinks=True)
    numpy = Path(np.__file__).parent
    for package in (numpy, numpy.with_name("numpy.libs")):
        shutil.copytree(package, inside / package.name, ignore=unwanted)
    copies = {python, Path("/bin/sh"), *_libraries(python, Path("/bin/sh"), *inside.rglob("*.so"))}
    for file in copies:
        (tree / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tree / file.relative_to("/"))
    own = tree / PYTHON.lstrip("/")
    own.parent.mkdir(parents=True)
    own.symlink_to(python)
    return tree


def _libraries(*programs: Path) -> set[Path]:
    """The shared libraries that programs need from the system."""
    told = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    return {Path(path) for path in re.findall(r"(?:=>|^)\s+(/\S+) \(0x", told, re.MULTILINE) if Path(path).exists()}


def make_archive(file: Path, agent: str = AGENT) -> Path:
    """Pack the agent as the driver expects it."""
    with tarfile.open(file, "w") as archive:
        for name, text in (("guest/__init__.py", ""), ("guest/agent.py", agent)):
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


@dataclass(frozen=True)
class RunnableMachine:
    """A machine and a way to run code in it."""

    machine: StdioMachine
    stream: ByteStream
    answers: BufferedByteReceiveStream

    async def run(self, code: str) -> str:
        """Return what code prints, or its traceback."""
        await self.send(code)
        with anyio.fail_after(HANG_S):
            return str(json.loads(await self.answers.receive_until(b"\n", MAX_ANSWER)))

    async def send(self, code: str) -> None:
        """Start code, and do not wait for its end."""
        await self.stream.send(json.dumps(code).encode() + b"\n")


class Bubblewrap:
    """The driver and the parts of its machines."""

    def __init__(self, folder: Path) -> None:
        self.driver = BubblewrapDriver(DriverConfig(run_dir=folder, cache_dir=folder))
        self.tree = make_tree(folder / "tree")
        self._numbers = itertools.count()
        self.code = GuestCode(make_archive(folder / "agent.tar"))

    def spec(self, name: str | None = None, **changes: object) -> MachineSpec:
        wanted = {"id": name or f"boxed-{next(self._numbers)}", "root": self.tree, "boot": self.code, **SIZE, **changes}
        return MachineSpec(**wanted)  # type: ignore[arg-type]

    @asynccontextmanager
    async def machine(self, spec: MachineSpec | None = None) -> AsyncIterator[RunnableMachine]:
        """Start a machine that runs code."""
        async with self.driver.launch(spec or self.spec()) as machine:
            assert isinstance(machine, StdioMachine)
            stream = await machine.connect()
            async with stream:
                yield RunnableMachine(machine, stream, BufferedByteReceiveStream(stream))


# -- fixtures, for the conftest.py files --------------------------------------------------------------------


@pytest.fixture(scope="session")
async def bubblewrap(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Bubblewrap:
    """The driver; tests are skipped on hosts where it cannot be used."""
    found = Bubblewrap(tmp_path_factory.mktemp("bubblewrap"))
    verdict = await found.driver.probe()
    if not verdict.usable:
        pytest.skip(verdict.reason)
    return found


@pytest.fixture(scope="module")
async def inside(bubblewrap: Bubblewrap, anyio_backend: str) -> AsyncIterator[RunnableMachine]:
    """One machine for all tests of a file that leave it as it was."""
    async with bubblewrap.machine() as inhabitant:
        yield inhabitant
