"""Sandboxes in network mode `nat` from the service on, and what a killed server leaves of them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.functional.checkout import REPO
from tests.nat_world import HOST, World, open_world
from tests.waiting import HANG_S, assert_soon_empty, promised
from vmm.process import find_tool

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network devices"),
    pytest.mark.skipif(not (find_tool("nft") and find_tool("bwrap")), reason="nftables or bubblewrap is not installed"),
]


@contextmanager
def server(world: World, what: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the world's host that has started a machine, or recovered."""
    argv = ["nsenter", f"--net={world.host}", sys.executable, "-m", "tests.functional.nat_script", what]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=REPO, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_sandbox_whose_template_and_operator_allow_it_reaches_the_internet_by_name(tmp_path: Path):
    folder = tmp_path / "with-nat"
    shutil.copytree(REPO / "templates" / "python-data-analysis", folder)
    definition = (folder / "template.toml").read_text().replace("python-data-analysis", "with-nat")
    (folder / "template.toml").write_text(f'network = "nat"\n{definition}')
    with open_world() as world:
        argv = ["nsenter", f"--net={world.host}", sys.executable, "-m", "tests.functional.nat_script", str(folder)]
        ran = subprocess.run(argv, cwd=REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S)
        assert ran.stdout == f"nat world sees {HOST}\nready\n", ran.stderr
        assert world.leftovers() == []


async def test_a_killed_server_leaves_no_link_and_the_next_one_removes_its_table():
    with open_world() as world:
        with server(world, "machine") as killed:
            assert len(world.links()) == len(world.tables()) == 1
            killed.kill()
        await assert_soon_empty(world.links, promised())
        assert f"-{killed.pid}-" in world.tables()[0]
        with server(world, "recover"):
            await assert_soon_empty(world.tables, promised())


async def test_a_running_server_keeps_its_table_when_another_one_starts():
    with open_world() as world, server(world, "machine"):
        with server(world, "recover") as other:
            other.communicate()
        assert len(world.links()) == len(world.tables()) == 1
