"""Property tests that try new inputs in every run, all of them together for about a minute.

Other property tests try the same inputs every time, see tests/conftest.py. A failure prints its smallest input, and
`@reproduce_failure(...)` with that input: put it above the test, below `fuzzed`, to repeat the failure.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import ParamSpec

from hypothesis import HealthCheck, settings

FUZZ_S = float(os.environ.get("FUZZ_S", "12"))  # of each test, whatever the speed of the host
BATCH = 50  # inputs between two looks at the clock

P = ParamSpec("P")

_new_inputs = settings(
    derandomize=False,
    database=None,
    print_blob=True,
    deadline=None,
    max_examples=BATCH,
    suppress_health_check=[HealthCheck.too_slow],  # as slow as the host
)


def fuzzed(test: Callable[P, None]) -> Callable[P, None]:
    """Repeat a property test with new inputs until its time is over."""
    new_inputs = _new_inputs(test)

    @functools.wraps(new_inputs)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> None:
        end = time.monotonic() + FUZZ_S
        new_inputs(*args, **kwargs)
        while time.monotonic() < end:
            new_inputs(*args, **kwargs)

    return repeated
