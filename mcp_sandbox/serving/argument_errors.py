"""What to tell a model about arguments that a tool does not take: one line, with the right name or value."""

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from guest.client.wire import one_line
from mcp_sandbox.serving.arguments import FAR

MAX_NAMES = 5  # of unknown or invalid arguments in an error
MOST_PROBLEMS = 100  # with more none is named: describing each takes time and memory
MAX_NAME_CHARS = 60
MAX_VALUE_CHARS = 40
MAX_PROBLEM_CHARS = 300
NAMED_ITEMS = 20  # values or fields that a description names
# What models call an argument that has another name here, by our name.
MEANINGS: dict[str, tuple[str, ...]] = {
    "stdin": ("input", "standard_input", "input_data", "stdin_text"),
    "timeout_s": ("timeout", "timeout_seconds", "timeout_sec", "timeout_ms", "time_limit", "max_time", "max_seconds"),
    "code": ("source", "source_code", "script", "program", "snippet", "python", "command"),
    "command": ("cmd", "shell", "bash", "script", "commands", "code"),
    "content": ("text", "data", "contents", "body", "file_content", "file_text"),
    "path": ("file", "filename", "file_path", "filepath", "name", "directory", "dir", "folder"),
    "sandbox_id": ("id", "sandbox", "session", "session_id", "container", "container_id"),
    "run_id": ("run", "id", "job_id", "task_id", "execution_id", "process_id", "pid"),
    "template": ("image", "language", "lang", "runtime", "kernel"),
    "cwd": ("working_dir", "working_directory", "workdir", "dir", "directory", "path"),
    "env": ("environment", "environment_variables", "env_vars", "envs", "variables"),
    "background": ("detach", "detached", "async", "run_in_background", "in_background", "is_background"),
    "keep_processes": ("keep_alive", "daemon"),
    "cases": ("tests", "test_cases", "testcases", "examples"),
    "case_timeout_s": ("case_timeout", "timeout_per_case"),
    "memory_mb": ("memory", "ram", "ram_mb", "mem", "memory_limit", "memory_limit_mb"),
    "memory_limit_mb": ("memory", "memory_mb", "memory_limit", "mem"),
    "cpus": ("cpu", "cores", "vcpus", "cpu_count"),
    "flags": ("compiler_flags", "cflags", "cxxflags", "args", "options"),
    "offset": ("start", "from", "position", "skip", "start_index", "cursor", "next_offset"),
    "limit": ("max_bytes", "length", "size", "bytes", "count"),
    "wait_s": ("wait", "wait_seconds", "timeout", "timeout_s"),
    "ttl_s": ("ttl", "lifetime", "max_age", "timeout", "timeout_s"),
    "idle_s": ("idle_timeout", "idle"),
    "network": ("internet", "net", "network_mode", "allow_network"),
    "allow_domains": ("domains", "allowed_domains", "hosts"),
    "count": ("copies", "number", "num", "n"),
    "append": ("mode",),
    "encoding": ("format", "base64", "as_base64", "binary"),
    "recursive": ("depth", "deep"),
    "query": ("q", "search", "search_query", "keywords"),
    "max_results": ("limit", "num_results", "top_k", "count", "n"),
    "time_range": ("freshness", "recency", "since"),
    "site": ("domain",),
    "url": ("uri", "address", "link", "href"),
    "max_chars": ("max_length", "max_characters", "limit"),
    "start_index": ("offset", "start"),
    "event": ("payload", "input", "body"),
    "handler": ("function", "entrypoint"),
    "source": ("src", "from", "path", "file"),
    "target": ("destination", "dest", "to", "output"),
}
EXTRA = "extra_forbidden"  # pydantic's name for a field that does not exist

Schema = Mapping[str, Any]


def unknown_argument(tool: str, given: Collection[str], known: Collection[str]) -> str | None:
    """Return what to tell a model that used an argument the tool does not have; None if all are known."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return None
    hints = [f"{name[:MAX_NAME_CHARS]!r}{_suggestion(name, known)}" for name in unknown[:MAX_NAMES]]
    return f"{tool} has no argument {', '.join(hints)}. Its arguments: {', '.join(known)}."


def unknown_tool(name: str, known: Collection[str]) -> str:
    """Return what to tell a model that called a tool which does not exist."""
    return f"Unknown tool: {one_line(name, MAX_NAME_CHARS)}{_suggestion(name, known)}. Tools: {', '.join(known)}."


def invalid_arguments(tool: str, error: ValidationError, schema: Schema) -> str:
    """Return what to tell a model whose arguments do not match the tool's plain schema."""
    if error.error_count() > MOST_PROBLEMS:
        return f"{tool} got invalid arguments: {error.error_count():,} values are wrong."
    found = error.errors(include_url=False, include_context=False)
    problems = [one_line(_problem(each, schema), MAX_PROBLEM_CHARS) for each in found[:MAX_NAMES]]
    more = f"; and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return f"{tool} got invalid arguments: {'; '.join(problems)}{more}."


def _problem(problem: ErrorDetails, schema: Schema) -> str:
    """Return one sentence about a value: what it has to be, and what it is."""
    *path, last = problem["loc"] or ("arguments",)
    place = one_line(".".join(map(str, problem["loc"])), MAX_NAME_CHARS)
    if problem["type"] == EXTRA:
        fields = _at(schema, path).get("properties", {})
        return f"{place} does not exist{_suggestion(str(last), fields)}"
    wanted = takes(_at(schema, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} is missing; it takes {wanted}"
    if problem["type"] in ("value_error", "assertion_error"):  # our own checks say more than a schema
        wanted = problem["msg"]
    return f"{place} takes {wanted}, but got {_shown(problem['input'])}"


def _at(schema: Schema, path: Sequence[str | int]) -> Schema:
    """Return the schema of the value at `path`; an empty one if it is unknown."""
    for step in path:
        properties = schema.get("properties", {})
        inner = properties.get(step, schema.get("items", schema.get("additionalProperties")))
        schema = inner if isinstance(inner, dict) else {}
    return schema


def takes(schema: Schema) -> str:
    """Describe what fits a schema."""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum'][:NAMED_ITEMS]))}"
    if "anyOf" in schema:
        return " or ".join(map(takes, schema["anyOf"]))
    match schema.get("type"):
        case "string":
            return "text" + _between(schema, "minLength", "maxLength", " characters")
        case "integer" | "number" as kind:
            return ("a whole number" if kind == "integer" else "a number") + _range(schema)
        case "boolean":
            return "true or false"
        case "array":
            return f"a list{_between(schema, 'minItems', 'maxItems', ' items')}, each {takes(schema.get('items', {}))}"
        case "object" if schema.get("properties"):
            return f"an object with {', '.join(list(schema['properties'])[:NAMED_ITEMS])}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"an object of {takes(inner)}" if isinstance(inner, dict) and inner else "an object"
        case "null":
            return "null"
    return "any JSON value"


def _between(schema: Schema, least: str, most: str, unit: str) -> str:
    match schema.get(least), schema.get(most):
        case None | 0, None:
            return ""
        case None | 0, int(top):
            return f" of at most {top:,}{unit}"
        case int(bottom), None:
            return f" of at least {bottom:,}{unit}"
        case bottom, top:
            return f" of {bottom:,} to {top:,}{unit}"


def _range(schema: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[name]:.15g}" for name, word in words.items() if abs(schema.get(name, FAR)) < FAR]
    return f", {' and '.join(bounds)}" if bounds else ""


def _shown(value: object) -> str:
    """Return a value in a few words: short ones as JSON, and the size of others."""
    match value:
        case str():
            return json.dumps(value[:MAX_VALUE_CHARS], ensure_ascii=False) + "…" * (len(value) > MAX_VALUE_CHARS)
        case list():
            return f"a list of {len(value):,}"
        case dict():
            return f"an object with {', '.join(map(str, list(value)[:MAX_NAMES]))}"[:MAX_NAME_CHARS]
        case None | bool() | int() | float():
            return json.dumps(value)[:MAX_VALUE_CHARS]
    return type(value).__name__


def _suggestion(name: str, known: Collection[str]) -> str:
    """Return the argument that is probably meant, in brackets: the same letters, the same meaning, or similar."""
    letters = _letters(name[:MAX_NAME_CHARS])
    same = [other for other in known if _letters(other) == letters]
    meant = [other for other in known if letters in map(_letters, MEANINGS.get(other, ()))]
    close = difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1, cutoff=0.5)
    found = same or meant or close
    return f" (did you mean {found[0]}?)" if found else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
