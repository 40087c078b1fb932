"""Why a job failed, as data."""

from typing import Any


class WebError(Exception):
    """A job failed; the host gets the code, the message and the fields. Codes are listed in docs/errors.md."""

    def __init__(self, code: str, message: str, **fields: str | int | None) -> None:
        super().__init__(message)
        self.code = code
        self.fields = fields

    def as_header(self) -> dict[str, Any]:
        """Return the answer to the host."""
        return {"error": {"code": self.code, "message": str(self)[:500], **self.fields}}
