"""Arguments of tools: short schemas for models to read, and help with names they get wrong."""

import difflib
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from guest.client.wire import one_line

NULL = {"type": "null"}
MAX_NAMES = 5  # of unknown or invalid arguments in an error
MOST_PROBLEMS = 100  # with more none is named: describing each takes time and memory
MAX_NAME_CHARS = 60
MAX_PROBLEM_CHARS = 200
# Names that models know from other tools and that do not look like ours.
SYNONYMS = {
    "input": "stdin",
    "source": "code",
    "script": "code",
    "cmd": "command",
    "text": "content",
    "data": "content",
}


def lean(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema without titles, which repeat names, and without null for what can be left out."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: lean(part) for name, part in schema.items() if not (name == "title" and isinstance(part, str))}
    match kept.get("anyOf"):
        case [dict(only), null] if null == NULL and "default" in kept and kept["default"] is None:
            del kept["anyOf"], kept["default"]
            return only | kept
    return kept


def unknown_argument(tool: str, given: Collection[str], known: Collection[str]) -> str | None:
    """Return what to tell a model that used an argument the tool does not have; None if all are known."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return None
    hints = [f"{name[:MAX_NAME_CHARS]!r}{_suggestion(name[:MAX_NAME_CHARS], known)}" for name in unknown[:MAX_NAMES]]
    return f"{tool} has no argument {', '.join(hints)}. Its arguments: {', '.join(known)}."


def invalid_arguments(tool: str, error: ValidationError) -> str:
    """Return what to tell a model whose arguments do not match the schema, without pydantic's links and types."""
    if error.error_count() > MOST_PROBLEMS:
        return f"{tool} got invalid arguments: {error.error_count():,} values are wrong."
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(map(str, problem["loc"])) for problem in found[:MAX_NAMES]]
    problems = [
        f"{one_line(place, MAX_NAME_CHARS)}: {one_line(problem['msg'], MAX_PROBLEM_CHARS)}"
        for place, problem in zip(places, found, strict=False)
    ]
    more = f"; and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return f"{tool} got invalid arguments. {'; '.join(problems)}{more}."


def _suggestion(name: str, known: Collection[str]) -> str:
    synonym = SYNONYMS.get(name)
    close = [synonym] if synonym in known else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
