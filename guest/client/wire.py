"""The types of values that an agent sends, and the one way to check them.

Every byte from a machine is hostile: `check` returns a value of the right type and size or raises ProtocolError.
Fields of the messages are declared with the types here; pydantic checks them strictly and ignores unknown fields.
"""

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from guest.errors import ProtocolError

MAX_REASON = 200  # characters of an error message that quotes the agent

T = TypeVar("T")


def _replace_surrogates(value: object) -> object:
    """Make a string encodable as UTF-8: names of files may contain half surrogate pairs, and JSON can carry them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and not value.isascii() else value


Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
ExitCode = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31)]
Number = Annotated[float, Field(strict=True, gt=-1e18, lt=1e18)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True), BeforeValidator(_replace_surrogates)]
SignalName = Annotated[Text, Field(pattern=r"^(SIG[A-Z0-9]{1,17})?$")]  # status lines show it as it is


def check(adapter: TypeAdapter[T], value: object, what: str) -> T:
    """Return `value` as what `adapter` describes. Raises ProtocolError."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise ProtocolError(f"the agent's {what} is invalid: {reason[:MAX_REASON]}")
