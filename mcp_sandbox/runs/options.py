"""What may be asked of a run besides its code: which language understands what, and how much of it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from guest.client.reports import MAX_CASES
from guest.protocol import MAX_BODY, encode_json
from mcp_sandbox.errors import BadRequest, InputTooLarge, WrongLanguage
from mcp_sandbox.runs.invocations import check_language
from mcp_sandbox.runs.results import RunRequest
from templates.model import Template

COMPILED = {"cpp": "C++", "go": "Go"}  # languages, as people write them
COMPILED_TEMPLATES = "cpp-algorithm or go-algorithm"
SANITIZERS = ("address", "undefined", "thread")
# What says where the program goes: g++ takes the path in the same word, go after an equals sign.
OUTPUT_FLAGS = {"cpp": re.compile(r"-o|--output"), "go": re.compile(r"--?o(=|$)")}
MAX_FLAGS = 50
MAX_FLAG_CHARS = 200
MIN_MEMORY_MB = 32  # a program's peak is never measured lower than that of the process that starts it, 20 MB


def check_options(request: RunRequest, template: Template) -> None:
    """See that a machine of `template` can do what is asked of it.

    Raises:
        BadRequest: it cannot.
    """
    options = request.options
    if request.kind == "invoke":
        check_language(template)
    if request.kind != "code" or options is None:
        return
    if template.language not in COMPILED and (wrong := options.keys() - {"stdin"}):
        raise WrongLanguage(
            f"{_and(wrong)} can only be used with compiled languages, and template {template.name} is for "
            f"{template.language}. Templates such as {COMPILED_TEMPLATES} have one."
        )
    for name, value in options.items():
        _CHECKS[name](value, options, template)
    size = len(request.code.encode(errors="replace")) + len(encode_json(dict(options)))
    if size > MAX_BODY:
        raise InputTooLarge(
            f"Code, input and expected output have {size:,} bytes together; at most {MAX_BODY:,} are possible. "
            "Use fewer cases at once."
        )


def _and(names: set[str]) -> str:
    return " and ".join(sorted(names))


def _check_stdin(_value: str, options: Mapping[str, Any], _template: Template) -> None:
    if "cases" in options:
        raise BadRequest("Give stdin or cases, not both: every case has its own stdin.")


def _check_cases(cases: list[Any], _options: Mapping[str, Any], _template: Template) -> None:
    if not 1 <= len(cases) <= MAX_CASES:
        raise BadRequest(f"There are {len(cases)} cases; give 1 to {MAX_CASES} at once.")


def _check_flags(flags: list[str], _options: Mapping[str, Any], template: Template) -> None:
    if len(flags) > MAX_FLAGS:
        raise BadRequest(f"There are {len(flags)} flags; at most {MAX_FLAGS} are allowed.")
    for flag in flags:
        good = flag.startswith("-") and flag.isprintable() and 1 < len(flag) <= MAX_FLAG_CHARS
        if not good:
            raise BadRequest(
                f"{flag[:60]!r} is not a flag. Each flag is a separate string that begins with '-', such as '-O3', "
                f"and has at most {MAX_FLAG_CHARS} characters."
            )
        if OUTPUT_FLAGS[template.language].match(flag):
            raise BadRequest("Leave out the flag -o: the location of the program is fixed.")


def _check_sanitize(names: list[str], _options: Mapping[str, Any], template: Template) -> None:
    if template.language != "cpp":
        raise WrongLanguage(
            f"There are no sanitizers for {COMPILED[template.language]}: its race detector needs a C compiler, and "
            f"template {template.name} has none. Leave out sanitize."
        )
    if not names or set(names) - set(SANITIZERS):
        raise BadRequest(f"sanitize is a list of {', '.join(SANITIZERS)}.")
    if {"address", "thread"} <= set(names):
        raise BadRequest("The sanitizers address and thread exclude each other: use one per run.")


def _check_case_timeout(_value: float, options: Mapping[str, Any], _template: Template) -> None:
    if "cases" not in options:
        raise BadRequest("case_timeout_s needs cases. The time of a single run is limited by timeout_s.")


def _check_memory_limit(megabytes: int, _options: Mapping[str, Any], template: Template) -> None:
    most = template.machine.memory_mb
    if not MIN_MEMORY_MB <= megabytes <= most:
        raise BadRequest(f"memory_limit_mb must be {MIN_MEMORY_MB} to {most}: a sandbox of this template has {most}.")


_CHECKS: Mapping[str, Callable[[Any, Mapping[str, Any], Template], None]] = {
    "stdin": _check_stdin,
    "cases": _check_cases,
    "flags": _check_flags,
    "sanitize": _check_sanitize,
    "case_timeout_s": _check_case_timeout,
    "memory_limit_mb": _check_memory_limit,
}
