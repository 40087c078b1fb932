"""Reseeds every random generator in this process: clones must not produce the same values."""

import os
import random
import sys
from typing import Any

MT19937_BYTES = 624 * 4  # the key of numpy's global generator, at the start of its state


class Generators:
    """The generators of a kernel. Call `seed` in the new process, `reseed` in every clone of it."""

    def __init__(self) -> None:
        self.used = False  # code that may have drawn from them has run since they were seeded
        self._numpy_key: Any = None

    def seed(self) -> None:
        """Seed all loaded generators from the operating system; the others seed themselves when they are loaded."""
        self.used = False
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
            self._numpy_key = numpy_key(numpy_random)
        self._seed_others()

    def reseed(self, *, everything: bool = False) -> None:
        """Seed them again, in a clone; `everything`: also the generators that code has made.

        On an emulated CPU numpy's own seeding takes a third of a restore. So if no code has run since, the key of its
        generator is overwritten in place.
        """
        if self.used or self._numpy_key is None:
            self.seed()
        else:
            self._numpy_key[:] = os.urandom(MT19937_BYTES)
            self._seed_others()
        if everything:
            reseed_found()

    def _seed_others(self) -> None:
        random.seed()
        modules: dict[str, Any] = sys.modules
        if ssl := modules.get("ssl"):
            ssl.RAND_add(os.urandom(32), 32.0)
        if tempfile := modules.get("tempfile"):
            tempfile._name_sequence = None  # noqa: SLF001 - there is no other way
        if uuid := modules.get("uuid"):
            uuid._node = uuid._last_timestamp = None  # noqa: SLF001 - the same
        if process := modules.get("multiprocessing.process"):
            process.current_process().authkey = os.urandom(32)


def reseed_found() -> None:
    """Give a new state to all generators of `random` and numpy that the garbage collector knows.

    Those of the warm-up are not among them (`gc.freeze`), but code has not made them either. What cannot be seeded,
    such as a subclass that needs arguments, is left as it is.
    """
    import gc

    bit_generator = getattr(sys.modules.get("numpy.random"), "BitGenerator", None)
    for found in gc.get_objects():
        try:
            if isinstance(found, random.Random):
                found.seed()
            elif bit_generator is not None and isinstance(found, bit_generator):
                found.state = type(found)().state
        except Exception:  # noqa: S112 - code can define anything, even `__class__`
            continue


def numpy_key(numpy_random: Any) -> memoryview | None:  # noqa: ANN401 - a module that may not be there
    """Return the key of numpy's global generator as writable memory, from the address that it publishes for C code."""
    generator = numpy_random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    import ctypes

    key = (ctypes.c_ubyte * MT19937_BYTES).from_address(generator.ctypes.state_address)
    return memoryview(key).cast("B")
