"""Adds API keys to requests for the provider they belong to. Guests only know placeholders.

A provider may repeat parts of a request in its answer, such as the query or the path. So a placeholder is replaced
in one place only: the header or the parameter that carries the key, in requests for the one address that needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import h11

METHODS = (b"GET", b"POST")  # of searches; a server may answer others, such as TRACE, with the request itself


@dataclass(frozen=True, slots=True)
class Secret:
    """A key, the placeholder that a guest writes instead of it, and where the key may appear."""

    placeholder: str
    value: str = field(repr=False)
    path: str  # of the requests that may carry it
    header: str = ""  # its name in lower case
    parameter: str = ""  # of the query


def fill_in(secrets: Sequence[Secret], request: h11.Request) -> h11.Request:
    """Return a request with the placeholders replaced that are where they belong."""
    if request.method not in METHODS:
        return request
    path, mark, query = request.target.partition(b"?")
    headers = [(name, value) for name, value in request.headers]
    parameters = query.split(b"&")
    for secret in secrets:
        if path != secret.path.encode():
            continue
        old, new = secret.placeholder.encode(), secret.value.encode()
        if secret.header:
            place = secret.header.encode()
            headers = [(name, value.replace(old, new) if name == place else value) for name, value in headers]
        if secret.parameter:
            place = secret.parameter.encode() + b"="
            parameters = [place + new if parameter == place + old else parameter for parameter in parameters]
    return h11.Request(method=request.method, target=path + mark + b"&".join(parameters), headers=headers)
