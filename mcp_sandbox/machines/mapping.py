"""Errors of machines and templates, said as those of sandboxes."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from guest.errors import GuestError
from mcp_sandbox.errors import DiskFull, HostNotReady, StartFailed
from templates.errors import TemplateError
from vmm.errors import DriverUnavailable, ToolFailed, VmmError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


@contextmanager
def mapped(done: str = "started") -> Iterator[None]:
    """Other rooms' errors as this room's."""
    try:
        yield
    except DriverUnavailable as error:
        raise HostNotReady(str(error), error.fix) from error
    except (VmmError, GuestError, TemplateError, OSError) as error:
        causes = list(_causes(error))
        for tool in (cause for cause in causes if isinstance(cause, ToolFailed)):
            logger.warning("a sandbox could not be %s: %s", done, tool)  # the caller has no use for a command line
        if any(map(_disk_full, causes)):
            raise DiskFull(done) from error
        why = error.gist if isinstance(error, ToolFailed) else error
        raise StartFailed(str(why), done) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _disk_full(error: BaseException) -> bool:
    """Whether room on the disk was what was missing; programs we call only have words for it."""
    return getattr(error, "errno", None) in DISK_FULL or os.strerror(errno.ENOSPC) in str(error)
