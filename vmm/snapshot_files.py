"""Reading the files of a snapshot: whether the snapshot is at fault, or the host that has no room for a copy of it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from vmm.errors import LaunchFailed, SnapshotFailed
from vmm.types import Snapshot

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


@contextmanager
def reading(snapshot: Snapshot) -> Iterator[None]:
    """Read a snapshot in the block, and copy what machines may not share.

    Raises:
        LaunchFailed: the host has no room for another machine; the snapshot is as good as before.
        SnapshotFailed: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise LaunchFailed(f"this host has no room for another machine: {error}") from error
        raise SnapshotFailed(f"the snapshot in {snapshot.path} cannot be read: {error}") from error
