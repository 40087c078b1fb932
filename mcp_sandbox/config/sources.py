"""Where settings come from, and which source wins."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from mcp_sandbox.config.names import variable_of

Values = dict[str, Any]  # by name, those of a group in a dictionary of their own


def environment_values(names: Iterable[str]) -> Values:
    """Return the settings among the environment variables. An empty variable counts as unset."""
    values: Values = {}
    for name in names:
        text = os.environ.get(variable_of(name))
        if text:
            group, _, field = name.rpartition(".")
            (values.setdefault(group, {}) if group else values)[field] = text
    return values


def merged(*sources: Mapping[str, Any]) -> Values:
    """Return the values of all sources. The first source that has a value wins, within groups as well."""
    values: Values = {}
    for source in reversed(sources):
        for name, value in source.items():
            below = values.get(name)
            values[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return values
