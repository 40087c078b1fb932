"""Changes to the environment of processes that run already."""

from collections.abc import Mapping, MutableMapping

Changes = Mapping[str, str | None]  # None: the variable is removed


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> Changes:
    """Return the changes that make one environment the other, as far as a shell can make them."""
    changes = {name: new.get(name) for name in (*old, *new) if old.get(name) != new.get(name)}
    return {name: value for name, value in changes.items() if name.isascii() and name.isidentifier()}


def apply(environment: MutableMapping[str, str], changes: Changes) -> None:
    """Change an environment."""
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
