"""Let pydantic build models at their first use: a server that starts defines hundreds, and uses few."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

LATER = ConfigDict(defer_build=True)


@contextmanager
def models_built_later() -> Iterator[None]:
    """Build models and adapters of unions that are defined meanwhile at their first use."""
    at_once = TypeAdapter.__init__

    def init(self: TypeAdapter[Any], type: Any, *, config: ConfigDict | None = None, **others: Any) -> None:  # noqa: A002, ANN401 - as pydantic has it
        if config is None and isinstance(type, UnionType):  # other types may have a configuration of their own
            config = LATER
        depth = others.pop("_parent_depth", 2) + 1  # of the frame whose names the type may mention
        at_once(self, type, config=config, _parent_depth=depth, **others)

    BaseModel.model_config["defer_build"] = True
    TypeAdapter.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        TypeAdapter.__init__ = at_once  # type: ignore[method-assign]
        del BaseModel.model_config["defer_build"]
