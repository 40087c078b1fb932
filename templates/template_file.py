"""Read a template.toml into a Template, or report every error in it with its line."""

import re
import tomllib
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from templates.errors import InvalidTemplate, Problem
from templates.model import Template
from templates.toml_lines import Field, line_of, lines_of

# Fields of Template that do not come from the file, and what to tell an author who sets them.
_NOT_IN_FILE = {
    "name": "remove it; a template has the name of its directory",
    "folder": "remove it; the folder is where this file is",
}
_ADVICE = {
    "extra_forbidden": "there is no such field; remove it or correct its spelling",
    "missing": "this field is required; add it",
    "model_type": "this must be a table",
}
# What to write in a field whose value must match a pattern.
_EXAMPLES = {
    "wheels": "must name one exact version, like 'numpy==2.4.6'",
    "packages": "must name a package, like 'graphviz', or one of another suite, like 'golang-go/trixie'",
    "oci": "must name an image, like 'docker.io/library/debian:12' or 'oci-archive:image.tar'",
    "dockerfile": "must name a file below this directory, like 'Dockerfile'",
    "env": "must be a variable's name: letters, digits and underscores, not starting with a digit",
}
_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")  # the end of tomllib's messages
_KEY_MARK = "[key]"  # pydantic appends it to the location of an invalid key


def read_template(path: Path) -> Template:
    """Read a template.toml; the template is named after its directory. Raises InvalidTemplate."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InvalidTemplate(path, Problem(f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidTemplate(path, Problem(f"this is not UTF-8: {error.reason}", line=line)) from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
        raise InvalidTemplate(path, _syntax_problem(text, str(error))) from None
    found: list[tuple[Field, str]] = [((name,), advice) for name, advice in _NOT_IN_FILE.items() if name in table]
    try:
        template = Template.model_validate({**table, "name": path.parent.name, "folder": path.parent})
    except ValidationError as error:
        found += [(_field_of(details), _message_of(details)) for details in error.errors(include_url=False)]
    else:
        if not found:
            return template
    lines = lines_of(text)
    problems = [Problem(message, _dotted(field), line_of(lines, field)) for field, message in found]
    raise InvalidTemplate(path, *sorted(problems, key=lambda problem: (problem.line, str(problem))))


def _syntax_problem(text: str, message: str) -> Problem:
    position = _POSITION.search(message)
    line = int(position.group(1)) if position and position.group(1) else max(1, len(text.splitlines()))
    return Problem(f"this is not valid TOML: {_POSITION.sub('', message)}", line=line)


def _field_of(details: ErrorDetails) -> Field:
    return tuple(part for part in details["loc"] if part != _KEY_MARK)


def _message_of(details: ErrorDetails) -> str:
    if details["type"] == "string_pattern_mismatch":
        for field, advice in _EXAMPLES.items():
            if field in details["loc"]:
                return f"{details['input']!r} {advice}"
    return _ADVICE.get(details["type"], details["msg"].removeprefix("Value error, "))


def _dotted(field: Field) -> str:
    """Return a field in dotted notation: source.debian.wheels[0]."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
    return "".join(parts).removeprefix(".")
