"""The types of values that an agent sends, and the one way to check them.

Every byte from a machine is hostile: `check` returns a value of the right type and size or raises ProtocolError.
Fields of the messages are declared with the types here; pydantic checks them strictly and ignores unknown fields.
"""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from guest.errors import ProtocolError

MAX_REASON = 200  # characters of an error message that quotes the agent
MAX_PATH = 4096  # characters; Linux has no longer paths

T = TypeVar("T")


def _replace_surrogates(value: object) -> object:
    """Make a string encodable as UTF-8: names of files may contain half surrogate pairs, and JSON can carry them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and not value.isascii() else value


def one_line(text: str, most: int) -> str:
    """Return at most `most` characters of `text` without line breaks, control and invisible characters.

    They become escapes, so that a text of the machine can pass for nothing but that text.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def line(most: int) -> AfterValidator:
    """Return the annotation of a text that is shown in one line."""
    return AfterValidator(lambda text: one_line(text, most))


Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
ExitCode = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31)]
Number = Annotated[float, Field(strict=True, gt=-1e18, lt=1e18)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True), BeforeValidator(_replace_surrogates)]
Path = Annotated[Text, Field(max_length=MAX_PATH)]
SignalName = Annotated[Text, Field(pattern=r"^(SIG[A-Z0-9]{1,17})?$")]  # status lines show it as it is


def check(adapter: TypeAdapter[T], value: object, what: str) -> T:
    """Return `value` as what `adapter` describes. Raises ProtocolError."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise ProtocolError(f"the agent's {what} is invalid: {reason[:MAX_REASON]}")
