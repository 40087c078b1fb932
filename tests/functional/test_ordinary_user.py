"""MCP servers run as the user whose editor starts them: every driver keeps its contract without root, too.

Only what depends on the rights of that user is tested again: how machines are confined, started, saved, restored,
stopped, and limited without cgroups. Such tests are marked `rights`. The inside of a machine is the same for each user.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcp_sandbox.config import Settings, load_settings
from templates.store import Store
from tests.functional.checkout import REPO
from tests.functional.ordinary_user import OrdinaryUser, ordinary_user

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

PLACES = [place for place in ("/tmp", "/var/tmp", "/dev/shm", "/run") if Path(place).is_dir()]
# What takes long to build and is the same for every user. Snapshots are not: the user takes their own.
COPIED = {
    "qemu": ("image", "kernel", "initramfs"),
    "gvisor": ("image", "agent", "program"),
    "bubblewrap": ("image", "tree", "agent"),
}
BUILDS = [f"tests/functional/test_{part}.py" for part in ("image_limits", "image_sources", "template_build")]
NETWORK = ["tests/functional/test_sandbox_network.py"]
# The size of a virtual machine is its limit, its kernel filters calls, and it has no network device.
INSIDE = "limits or guest_filter or hostile_code or offline"


def copy_store(settings: Settings, kinds: Sequence[str], user: OrdinaryUser) -> Path:
    """Copy what the default template needs into a store of the user."""
    store = user.home / "store"
    for entry in Store(settings.home).entries():
        if entry.kind in kinds and entry.details.get("template", settings.template) == settings.template:
            shutil.copytree(entry.path, store / entry.kind / entry.key, symlinks=True)
    user.give(store)
    return store


@pytest.mark.parametrize("driver", list(COPIED))  # others need KVM that works
def test_an_ordinary_user_has_machines_that_keep_the_contract(driver: str):
    with ordinary_user() as user:
        store = copy_store(load_settings(), COPIED[driver], user)
        chosen = f"{driver} and not ({INSIDE})" if driver == "qemu" else driver
        run_tests(user, store, "-m", "rights", "-k", chosen, "tests/contract", "tests/security")


def test_the_home_of_an_ordinary_user_is_private():
    with ordinary_user() as user:
        store = copy_store(load_settings(), ("program",), user)
        run_tests(user, store, "-m", "not vm", "tests/security/test_private_home.py")


@pytest.mark.parametrize("driver", ["bubblewrap"])
def test_sandboxes_of_an_ordinary_user_reach_through_the_proxy_what_is_allowed(driver: str):
    with ordinary_user() as user:
        store = copy_store(load_settings(), COPIED[driver], user)
        run_tests(user, store, "-k", f"{driver} and (curl or git or refused_domain or no_other)", *NETWORK)


def test_an_ordinary_user_builds_templates_and_leaves_nothing():
    with ordinary_user() as user:
        # Some need a base, so this user makes one.
        store = copy_store(load_settings(), ("image", "agent", "program", "kernel", "initramfs", "interpreter"), user)
        wanted = "explodes or without_end or secret or cancelled or (gvisor and single_program) or come_from_files"
        assert "skipped" not in run_tests(user, store, "-k", wanted, *BUILDS)
        left = subprocess.run(["find", *PLACES, "-not", "-path", f"{user.home}*", *_owned(user)], capture_output=True)
        assert left.stdout == b""


def run_tests(user: OrdinaryUser, store: Path, *arguments: str) -> str:
    options = ("-q", "--no-header", "-x", "-o", f"cache_dir={user.home}/pytest-cache")
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    ran = subprocess.run(
        user.command(command, {"MCP_SANDBOX_HOME": str(store)}), cwd=REPO, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert user.processes() == []
    return ran.stdout


def _owned(user: OrdinaryUser) -> list[str]:
    """Return the options with which find prints the files of a user and of the user's subordinate ids."""
    lines = [line.split(":") for line in Path("/etc/subuid").read_text().splitlines()]
    ((first, count),) = [(int(first), int(count)) for name, first, count in lines if name == user.name]
    return ["(", "-user", user.name, "-o", "-uid", f"+{first - 1}", "-uid", f"-{first + count}", ")", "-print"]
