"""A small cache whose entries expire."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ExpiringCache(Generic[K, V]):
    """Keeps the newest `size` values for `ttl_s` seconds each."""

    def __init__(self, ttl_s: float, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._size = size
        self._clock = clock
        self._kept: OrderedDict[K, tuple[float, V]] = OrderedDict()  # with the time of their end, the oldest first

    def get(self, key: K) -> V | None:
        """Return a value that has not expired."""
        end, value = self._kept.get(key, (0.0, None))
        return value if end > self._clock() else None

    def put(self, key: K, value: V) -> None:
        """Keep a value, and drop the oldest one if there are too many."""
        if self._ttl_s <= 0:
            return
        self._kept.pop(key, None)
        self._kept[key] = (self._clock() + self._ttl_s, value)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
