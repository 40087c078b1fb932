"""From the text of a template.toml to a template, or to what has to be mended in it, line by line."""

import re
import tomllib
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from templates.errors import InvalidTemplate
from templates.lines import Field, line_of, lines_of
from templates.model import Template

Problem = tuple[Field, str]  # where, and what would be right

# What a file does not say itself, and what to tell somebody who tries.
_GIVEN = {
    "name": "remove it; a template is called what its directory is called",
    "folder": "remove it; that is where this file lies",
}
_ADVICE = {
    "extra_forbidden": "there is no such field; remove it or mend its spelling",
    "missing": "this field is required; add it",
    "model_type": "this is a table with fields of its own",
}
# What a text that is checked by its pattern has to be, by its field.
_EXAMPLES = {
    "wheels": "must name one exact version, like 'numpy==2.4.6'",
    "packages": "must name a package, like 'graphviz', or one of another suite, like 'golang-go/trixie'",
    "oci": "must name an image, like 'docker.io/library/debian:12' or 'oci-archive:image.tar'",
    "dockerfile": "must name a file below this directory, like 'Dockerfile'",
    "env": "must be a variable's name: letters, digits and underscores, and no digit first",
}
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")  # how Python's reader ends its complaints
_OF_A_KEY = "[key]"  # what pydantic adds to the place of a key that is wrong itself


def read_template(path: Path) -> Template:
    """Read one template.toml; its name is that of the directory it lies in. Raises InvalidTemplate."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InvalidTemplate(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidTemplate(f"{path}:{line}: this is not UTF-8: {error.reason}") from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise InvalidTemplate(_syntax(path, text, str(error))) from None
    problems: list[Problem] = [((name,), what) for name, what in _GIVEN.items() if name in table]
    try:
        template = Template.model_validate({**table, "name": path.parent.name, "folder": path.parent})
    except ValidationError as error:
        problems += [(_field(problem), _explained(problem)) for problem in error.errors(include_url=False)]
    else:
        if not problems:
            return template
    lines = lines_of(text)
    told = sorted((line_of(lines, field), f"{_written(field)}: {what}") for field, what in problems)
    raise InvalidTemplate("\n".join(f"{path}:{line}: {what}" for line, what in told))


def _syntax(path: Path, text: str, complaint: str) -> str:
    place = _PLACE.search(complaint)
    line = place.group(1) if place and place.group(1) else str(max(1, len(text.splitlines())))
    return f"{path}:{line}: this is not valid TOML: {_PLACE.sub('', complaint)}"


def _field(problem: ErrorDetails) -> Field:
    return tuple(part for part in problem["loc"] if part != _OF_A_KEY)


def _explained(problem: ErrorDetails) -> str:
    if problem["type"] == "string_pattern_mismatch":
        for field, wanted in _EXAMPLES.items():
            if field in problem["loc"]:
                return f"{problem['input']!r} {wanted}"
    return _ADVICE.get(problem["type"], problem["msg"].removeprefix("Value error, "))


def _written(field: Field) -> str:
    """A field as people write it: source.debian.wheels[0]."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
    return "".join(parts).removeprefix(".")
