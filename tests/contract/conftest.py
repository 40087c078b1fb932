"""The ladder of fixtures up to a real machine, for every driver and for one that only tests know."""

from collections.abc import AsyncIterator

import pytest

from mcp_sandbox.app import Host
from tests.contract import toy_driver
from tests.functional.machines import anyio_backend, built, clone, loaded, machines, open_driver, shared, subject
from vmm.driver import DRIVERS

__all__ = ["anyio_backend", "built", "clone", "loaded", "machines", "shared", "subject"]

TOY = toy_driver.INFO.name
# Below the protocol of drivers the toy is bubblewrap, which the other files test already.
TOY_FILES = {"test_clones", "test_failed_starts", "test_machine"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the toy driver only where the protocol of drivers is tested."""
    repeated = [item for item in items if f"[{TOY}" in item.name and item.path.stem not in TOY_FILES]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in repeated]


@pytest.fixture(scope="package", params=[*DRIVERS, TOY])
async def host(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Host]:
    """This host with each of its drivers, the toy included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRIVERS, TOY, toy_driver.__name__)
        async with open_driver(request.param) as host:
            yield host
