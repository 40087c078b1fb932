"""Asks one search provider: the job "search".

The host chooses providers, and falls over from one to the next. This process has the network and parses only HTTP and
TLS. Answers are read by another process, without one.
"""

import json
from dataclasses import asdict
from typing import Any

import httpx

from guest.web import duckduckgo
from guest.web.client import check_refusal, web_errors
from guest.web.errors import WebError
from guest.web.offline import Reading, Result
from guest.web.providers import APIS, Found, Query

MAX_ANSWER = 4 * 1024 * 1024  # bytes of a provider's answer
MAX_RESULTS = 50  # what the host takes from one provider
MAX_ENGINE_ERRORS = 50
READ_S = 5.0  # for reading an answer

UNAUTHORISED, PAYMENT_REQUIRED, FORBIDDEN, TOO_MANY_REQUESTS = 401, 402, 403, 429
SPENT = (PAYMENT_REQUIRED, TOO_MANY_REQUESTS, 432, 433)  # the last two are Tavily's: a plan's limit, a budget's limit


def run(fields: dict[str, Any], client: httpx.Client, reader: Reading) -> Result:
    """Ask a provider; returns its results, and the errors of the engines behind it."""
    query = Query.of(fields)
    answer = _ask(query, client)
    try:
        return reader.read({"kind": fields["kind"], "query": asdict(query)}, answer, timeout_s=READ_S)
    except WebError as error:
        if error.code == "unreadable":
            raise WebError("bad_response", str(error)) from error
        raise


def read(order: dict[str, Any], answer: bytes) -> Result:
    """Return what is in an answer. Runs without a network."""
    query = Query.of(order["query"])
    found = Found(duckduckgo.read(answer.decode())) if query.provider == "duckduckgo" else _read_api(answer, query)
    return {"results": found.results[:MAX_RESULTS], "errors": found.errors[:MAX_ENGINE_ERRORS]}, b""


def _ask(query: Query, client: httpx.Client) -> bytes:
    if query.provider == "duckduckgo":
        return duckduckgo.ask(query, lambda request: _send(client, request)).encode()
    status, body = _send(client, APIS[query.provider].request(query))
    _check_status(status, query)
    return body


def _read_api(answer: bytes, query: Query) -> Found:
    try:
        return APIS[query.provider].parse(json.loads(answer), query)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WebError("bad_response", "its answer is not what its API promises") from error


def _send(client: httpx.Client, request: httpx.Request) -> tuple[int, bytes]:
    """Return the status and the body of an answer. Raises WebError."""
    for name, value in client.headers.items():
        request.headers.setdefault(name, value)
    with web_errors(""):
        response = client.send(request, stream=True)
        try:
            check_refusal(response)
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise WebError("too_large", f"its answer has more than {MAX_ANSWER} bytes")
        finally:
            response.close()
    return response.status_code, bytes(body)


def _check_status(status: int, query: Query) -> None:
    if status == httpx.codes.OK:
        return
    if query.provider == "searxng" and status == FORBIDDEN:
        raise WebError("no_json", "it refuses to answer in JSON", status=status)
    if status in (UNAUTHORISED, FORBIDDEN):
        raise WebError("key_refused", "it refuses the API key", status=status)
    if status in SPENT:
        raise WebError("rate_limited", "its rate limit or quota is used up", status=status)
    raise WebError("http_status", f"it answers with status {status}", status=status)
