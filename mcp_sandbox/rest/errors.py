"""Errors that only this face has."""

from dataclasses import dataclass

from mcp_sandbox.errors import FileError, SandboxError


@dataclass(eq=False)
class KeyReused(SandboxError):
    """The Idempotency-Key belongs to another request of the same owner; nothing was done."""

    code = "idempotency_key_reused"
    sentence = "The Idempotency-Key {key!r} was used with another request."
    key: str


@dataclass(eq=False)
class TooManyKeys(SandboxError):
    """Too many requests with an Idempotency-Key are being carried out; nothing was done."""

    code = "too_many_keys"
    sentence = "At most {limit} requests with an Idempotency-Key are carried out at once."
    limit: int


@dataclass(eq=False)
class UploadStalled(FileError):
    """The client stopped sending a file; what was there before is unchanged."""

    code = "upload_stalled"
    sentence = "{path} was not written: the client sent nothing for {waited_s:g} s."
    waited_s: float
