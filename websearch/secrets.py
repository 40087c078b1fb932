"""Adds API keys to requests for the host they belong to. Guests only know placeholders."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import h11


@dataclass(frozen=True, slots=True)
class Secret:
    """A key, and the placeholder that a guest writes instead of it."""

    placeholder: str
    value: str = field(repr=False)


def fill_in(secrets: Sequence[Secret], request: h11.Request) -> h11.Request:
    """Return a request with its placeholders replaced, in headers and in the address."""
    target = request.target
    headers = [(name, value) for name, value in request.headers]
    for secret in secrets:
        old, new = secret.placeholder.encode(), secret.value.encode()
        target = target.replace(old, new)
        headers = [(name, value.replace(old, new)) for name, value in headers]
    return h11.Request(method=request.method, target=target, headers=headers)
