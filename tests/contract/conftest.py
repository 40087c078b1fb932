"""The ladder of fixtures up to a real machine, for every driver and for one that only tests know."""

from collections.abc import Iterator

import pytest

from tests.contract import toy_driver
from tests.functional.machines import anyio_backend, built, clone, host, loaded, machines, shared
from vmm.driver import DRIVERS

__all__ = ["anyio_backend", "built", "clone", "host", "loaded", "machines", "shared"]

TOY = toy_driver.INFO.name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the contract with the toy driver, too."""
    if "host" in metafunc.fixturenames:
        metafunc.parametrize("host", [*DRIVERS, TOY], indirect=True, scope="package")


@pytest.fixture(scope="package", autouse=True)
def _toy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRIVERS, TOY, toy_driver.__name__)
        yield
