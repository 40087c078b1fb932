"""Reads one field of what an agent sent: it is what it should be, or ProtocolError is raised."""

from typing import Any, get_args

from guest.errors import ProtocolError


def whole(fields: dict[str, Any], key: str) -> int:
    """A non-negative integer."""
    value = fields.get(key)
    if type(value) is not int or not 0 <= value < 2**63:
        raise ProtocolError(f"the agent's {key!r} is not a size: {str(value)[:60]!r}")
    return value


def number(fields: dict[str, Any], key: str) -> float:
    """A finite number."""
    value: Any = fields.get(key)
    if type(value) not in (int, float) or not abs(value) < 1e18:
        raise ProtocolError(f"the agent's {key!r} is not a number: {str(value)[:60]!r}")
    return float(value)


def flag(fields: dict[str, Any], key: str) -> bool:
    """True or False."""
    value = fields.get(key)
    if type(value) is not bool:
        raise ProtocolError(f"the agent's {key!r} is not a boolean: {str(value)[:60]!r}")
    return value


def text(fields: dict[str, Any], key: str, limit: int | None = None) -> str:
    """A string that can be encoded as UTF-8 (JSON can smuggle in halves of surrogate pairs)."""
    value = fields.get(key)
    if type(value) is not str or (limit is not None and len(value) > limit):
        raise ProtocolError(f"the agent's {key!r} is not a string, or too long: {str(value)[:60]!r}")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def text_or_none(fields: dict[str, Any], key: str, limit: int | None = None) -> str | None:
    """A string, or nothing."""
    return None if fields.get(key) is None else text(fields, key, limit)


def choice(fields: dict[str, Any], key: str, kind: Any) -> Any:  # noqa: ANN401 - a Literal and its member
    """One of a Literal's strings."""
    value = fields.get(key)
    if type(value) is not str or value not in get_args(kind):
        raise ProtocolError(f"the agent's {key!r} is none of {get_args(kind)}: {str(value)[:60]!r}")
    return value


def table(value: Any, what: str) -> dict[str, Any]:  # noqa: ANN401 - checked here
    """An object."""
    if type(value) is not dict:
        raise ProtocolError(f"the agent's {what} is not an object")
    return value
