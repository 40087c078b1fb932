"""Changes to the environment of processes that run already."""

from collections.abc import Mapping, MutableMapping

Changes = Mapping[str, str | None]  # None: the variable is removed


def apply(environment: MutableMapping[str, str], changes: Changes) -> None:
    """Change an environment."""
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
