"""Translate errors of machines and templates into those of sandboxes."""

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
def map_errors(action: str = "started") -> Iterator[None]:
    """Raise errors of `vmm`, `guest` and `templates` as SandboxErrors. `action` says what failed."""
    try:
        yield
    except DriverUnavailable as error:
        raise HostNotReady(str(error), error.fix) from error
    except (VmmError, GuestError, TemplateError, OSError) as error:
        causes = list(_causes(error))
        for tool in (cause for cause in causes if isinstance(cause, ToolFailed)):
            logger.warning("a sandbox could not be %s: %s", action, tool)  # callers do not see the command line
        if any(map(_disk_full, causes)):
            raise DiskFull(action) from error
        reason = error.gist if isinstance(error, ToolFailed) else str(error)
        raise StartFailed(reason, action) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _disk_full(error: BaseException) -> bool:
    """Whether the disk was full; programs we call report it only in their message."""
    return getattr(error, "errno", None) in DISK_FULL or os.strerror(errno.ENOSPC) in str(error)
