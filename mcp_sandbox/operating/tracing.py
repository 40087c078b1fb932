"""Optional OpenTelemetry spans: nothing happens unless a setting asks for them and the package is installed."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_tracer: Any = None  # OpenTelemetry's own state is global too: one tracer for the process


def enable() -> bool:
    """Have spans made from now on, with the exporter that OpenTelemetry's own variables configure."""
    global _tracer  # noqa: PLW0603
    try:
        _tracer = importlib.import_module("opentelemetry.trace").get_tracer("mcp-sandbox")
    except ImportError:
        logger.warning("tracing is asked for, but the package opentelemetry-api is not installed")
    return _tracer is not None


def disable() -> None:
    """Make no more spans."""
    global _tracer  # noqa: PLW0603
    _tracer = None


@contextmanager
def span(name: str, **attributes: str | float | bool) -> Iterator[None]:
    """A span around the block. An error that leaves the block is recorded with it."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes=attributes):
        yield
