"""A machine that cannot start raises an error with the driver's reason, and leaves nothing."""

import dataclasses
from pathlib import Path

import pytest

from mcp_sandbox.machines.local import start, start_machine
from mcp_sandbox.machines.unique import new_identity
from tests.functional.machines import Machines
from vmm.errors import NetworkUnsupported, VmmError
from vmm.types import NetworkMode

pytestmark = [pytest.mark.vm, pytest.mark.rights]


async def test_the_error_of_a_machine_with_a_broken_root_has_the_reason(machines: Machines, tmp_path: Path):
    root = tmp_path / "root"
    tmp_path.chmod(0o755)
    if machines.host.driver.capabilities.root == "tree":
        root.mkdir(mode=0o755)
    else:
        root.write_bytes(b"this is no file system" * 1000)
        root.chmod(0o644)
    broken = dataclasses.replace(machines.built, root=root, snapshot=None)
    with pytest.raises(VmmError) as failure:
        async with start(machines.host.driver, broken, new_identity()):
            pass
    assert "closed the stream" not in str(failure.value)
    assert len(str(failure.value)) > 40


async def test_a_network_mode_that_the_driver_lacks_is_refused(machines: Machines):
    driver, built, mode = machines.host.driver, machines.built, NetworkMode.NAT
    if mode in driver.capabilities.networks:
        pytest.skip(f"{driver.name} has it")
    spec = built.spec("networked", mode)
    with pytest.raises(NetworkUnsupported, match=f"no network mode {mode}"):
        async with driver.launch(spec):
            pass
    if built.snapshot is not None:
        with pytest.raises(NetworkUnsupported):
            async with start_machine(driver, built, spec):
                pass
