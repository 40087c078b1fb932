"""Twenty clones of one snapshot, as the service gets them: nothing random in one is in another."""

import json
import time
from typing import Any

import anyio
import pytest

from tests.functional.machines import Machines, run
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

CLONES = 20
AT_ONCE = 3  # so that they also start beside each other
LOOK = """
import json, os, random, secrets, socket, ssl, tempfile, time, uuid
import numpy
print(json.dumps({
    "clock": time.time(),
    "os.urandom": os.urandom(16).hex(),
    "random.random": random.random(),
    "random.Random": random.Random().random(),
    "numpy.random.rand": numpy.random.rand(),
    "numpy.random.default_rng": numpy.random.default_rng().random(),
    "uuid.uuid4": str(uuid.uuid4()),
    "uuid.uuid1": str(uuid.uuid1()),
    "secrets.token_hex": secrets.token_hex(16),
    "ssl.RAND_bytes": ssl.RAND_bytes(16).hex(),
    "temporary name": next(tempfile._get_candidate_names()),
    "hostname": socket.gethostname(),
    "/etc/hostname": open("/etc/hostname").read(),
    "machine-id": open("/etc/machine-id").read(),
}))
"""
RANDOM = [
    *("os.urandom", "random.random", "random.Random", "numpy.random.rand", "numpy.random.default_rng", "uuid.uuid4"),
    *("uuid.uuid1", "secrets.token_hex", "ssl.RAND_bytes", "temporary name", "hostname", "/etc/hostname", "machine-id"),
]


@pytest.fixture(scope="module")
async def looks(loaded: Machines, anyio_backend: str) -> list[dict[str, Any]]:
    """Return what each clone printed in its first run, and when."""
    found: list[dict[str, Any]] = []

    async def look() -> None:
        async with loaded.leased() as lease:
            before = time.time()
            look = json.loads((await run(lease.agent, LOOK)).out)
            found.append({**look, "before": before, "after": time.time(), "id": lease.machine.id})

    async def look_often(times: int) -> None:
        for _ in range(times):
            await look()

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for number in range(AT_ONCE):
                tasks.start_soon(look_often, len(range(number, CLONES, AT_ONCE)))
    await loaded.assert_none_left()
    return found


@pytest.mark.parametrize("what", RANDOM)
def test_no_two_clones_share_a_value(looks: list[dict[str, Any]], what: str):
    values = [look[what] for look in looks]
    assert len(values) >= 20
    assert len(set(values)) == len(values)


def test_the_clock_of_every_clone_is_right_to_the_second(looks: list[dict[str, Any]]):
    assert [look["clock"] for look in looks if not look["before"] - 1 < look["clock"] < look["after"] + 1] == []


def test_every_clone_has_the_name_of_its_machine(looks: list[dict[str, Any]]):
    assert [look["hostname"] for look in looks] == [look["id"] for look in looks]
    assert [look["/etc/hostname"].strip() for look in looks] == [look["id"] for look in looks]


def test_every_machine_id_is_valid(looks: list[dict[str, Any]]):
    for look in looks:
        assert len(bytes.fromhex(look["machine-id"])) == 16


async def test_values_drawn_after_a_kernel_was_replaced_are_unique_too(machines: Machines):
    """A new kernel is forked from a process that every clone has in the same state."""
    values = set()
    for _ in range(2):
        async with machines.clone() as clone:
            await clone.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
            for code in ("random.random()", "numpy.random.rand()", "uuid.uuid4()", "os.urandom(16)"):
                values.add((await clone.run(f"import numpy, os, random, uuid; print({code})")).out)
    assert len(values) == 8
