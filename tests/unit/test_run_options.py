"""What may be asked of a run besides its code, and what is said where it may not."""

from typing import Any

import pytest

from mcp_sandbox.errors import BadRequest
from mcp_sandbox.runs.options import check_options
from mcp_sandbox.runs.results import RunRequest
from templates.catalogue import Catalogue

CPP, GO, PYTHON = (Catalogue().load(name) for name in ("cpp-algorithm", "go-algorithm", "python-data-analysis"))
CASES = [{"stdin": "1", "expected": "2"}]


def request(**options: Any) -> RunRequest:
    return RunRequest("me", "int main() {}", options=options)


@pytest.mark.parametrize(
    "options",
    [
        {"stdin": "1"},
        {"cases": CASES, "case_timeout_s": 1.5, "memory_limit_mb": 64},
        {"cases": CASES * 100},
        {"flags": []},
        {"flags": ["-O3", "-march=native", "-lpthread"]},
        {"sanitize": ["address", "undefined"]},
        {"memory_limit_mb": CPP.machine.memory_mb},
    ],
)
def test_what_makes_sense_is_let_through(options: dict[str, Any]):
    check_options(request(**options), CPP)


@pytest.mark.parametrize("language", ["python", "shell"])
def test_every_language_takes_stdin_and_a_run_without_options_is_always_right(language: str):
    template = PYTHON.model_copy(update={"language": language})
    check_options(request(stdin="1"), template)
    check_options(RunRequest("me", "1 + 1"), template)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": CASES}, "cases can only be used with compiled languages.*cpp-algorithm or go-algorithm"),
        ({"flags": ["-O3"], "sanitize": ["address"]}, "flags and sanitize can only be used"),
        ({"memory_limit_mb": 64}, "memory_limit_mb can only be used"),
    ],
)
def test_what_python_does_not_have_is_refused_with_the_templates_that_do(options: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        check_options(request(**options), PYTHON)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stdin": "1", "cases": CASES}, "not both"),
        ({"cases": []}, "give 1 to 100"),
        ({"cases": CASES * 101}, "There are 101 cases"),
        ({"case_timeout_s": 1}, "case_timeout_s needs cases"),
        ({"memory_limit_mb": 1}, "must be 32 to 1024"),
        ({"memory_limit_mb": 4096}, "must be 32 to 1024"),
        ({"flags": ["O3"]}, "'O3' is not a flag"),
        ({"flags": ["-"]}, "is not a flag"),
        ({"flags": ["-D\n"]}, "is not a flag"),
        ({"flags": ["-D" + "x" * 200]}, "at most 200 characters"),
        ({"flags": ["-g"] * 51}, "There are 51 flags"),
        ({"flags": ["-o", "-x"]}, "Leave out the flag -o"),
        ({"flags": ["-oelsewhere"]}, "Leave out the flag -o"),
        ({"flags": ["--output=elsewhere"]}, "Leave out the flag -o"),
        ({"sanitize": []}, "sanitize is a list of address, undefined, thread"),
        ({"sanitize": ["address", "thread"]}, "exclude each other"),
        ({"stdin": "x" * 2**20}, "Use fewer cases at once"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(options: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        check_options(request(**options), CPP)


@pytest.mark.parametrize("flag", ["-o", "-o=elsewhere", "--o=elsewhere"])
def test_go_is_not_told_where_to_put_the_program(flag: str):
    with pytest.raises(BadRequest, match="Leave out the flag -o"):
        check_options(request(flags=[flag]), GO)
    check_options(request(flags=["-overlay=files.json"]), GO)


def test_go_has_no_sanitizers_and_says_why():
    with pytest.raises(BadRequest, match="race detector needs a C compiler"):
        check_options(request(sanitize=["thread"]), GO)
