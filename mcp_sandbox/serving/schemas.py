"""Schemas of arguments, as short as they can be: every client reads them, most often at the beginning of every talk."""

from typing import Any

NULL = {"type": "null"}


def lean(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """A schema without titles, which repeat names, and without null for what can be left out just as well."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: lean(part) for name, part in schema.items() if not (name == "title" and isinstance(part, str))}
    match kept.get("anyOf"):
        case [dict(only), null] if null == NULL and "default" in kept and kept["default"] is None:
            del kept["anyOf"], kept["default"]
            return only | kept
    return kept
