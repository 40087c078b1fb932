"""Files in the home are private, whatever the user's umask. Files that the user asks for get the user's umask."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

PRIVATE_UMASK = 0o077

_users_umask: int | None = None  # None: the process does not keep its files private


def keep_private() -> None:
    """Create all files for this user only, from now on. Call it once, when the process starts."""
    global _users_umask  # noqa: PLW0603 - a umask belongs to the process, too
    _users_umask = os.umask(PRIVATE_UMASK)


@contextmanager
def users_umask() -> Iterator[None]:
    """Create files with the umask of the user who started us, for as long as the block lasts."""
    if _users_umask is None:
        yield
        return
    os.umask(_users_umask)
    try:
        yield
    finally:
        os.umask(PRIVATE_UMASK)
