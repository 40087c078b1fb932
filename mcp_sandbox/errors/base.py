"""The base of all errors that a caller can get."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(eq=False)
class SandboxError(Exception):
    """Base of all errors that a caller can get. Only subclasses are raised."""

    code: ClassVar[str] = "sandbox_error"
    sentence: ClassVar[str] = ""  # formatted with the fields
    hint = ""  # the next step, in errors that the SDK raises; no field, because it depends on the face

    def __str__(self) -> str:
        return self.sentence.format(**self.fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The typed fields, ready to be serialised."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def error_types(base: type[SandboxError] = SandboxError) -> Iterator[type[SandboxError]]:
    """Yield every error class below `base` that has been imported."""
    for kind in base.__subclasses__():
        yield kind
        yield from error_types(kind)
