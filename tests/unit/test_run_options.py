"""Options of code runs: which template supports which, and how the others are refused."""

from typing import Any

import pytest

from mcp_sandbox.errors import BadRequest
from mcp_sandbox.runs.requests import Case, CodeRun
from templates.catalogue import Catalogue

NAMES = ("cpp-algorithm", "go-algorithm", "java", "python-data-analysis")
CPP, GO, JAVA, PYTHON = map(Catalogue().load, NAMES)
CASES = (Case("1", "2"),)


def request(**options: Any) -> CodeRun:
    return CodeRun("me", "int main() {}", **options)


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
def test_supported_options_are_accepted(options: dict[str, Any]):
    request(**options).check_template(CPP)


@pytest.mark.parametrize("language", ["python", "shell"])
def test_every_language_accepts_stdin_and_no_options(language: str):
    template = PYTHON.model_copy(update={"language": language})
    request(stdin="1").check_template(template)
    CodeRun("me", "1 + 1").check_template(template)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": CASES}, "cases can only be used with compiled languages.*cpp-algorithm, go-algorithm or java"),
        ({"flags": ["-O3"], "sanitize": ["address"]}, "flags and sanitize can only be used"),
        ({"memory_limit_mb": 64}, "memory_limit_mb can only be used"),
    ],
)
def test_python_refuses_options_of_compiled_languages_and_names_their_templates(options: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        request(**options).check_template(PYTHON)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stdin": "1", "cases": CASES}, "not both"),
        ({"cases": ()}, "give 1 to 100"),
        ({"cases": CASES * 101}, "There are 101 cases"),
        ({"case_timeout_s": 1}, "case_timeout_s needs cases"),
        ({"keep_processes": True}, "ends with all its processes"),
        ({"memory_limit_mb": 1}, "must be 32 to 1024"),
        ({"memory_limit_mb": 4096}, "must be 32 to 1024"),
        ({"flags": ["O3"]}, "'O3' is not a flag"),
        ({"flags": ["-"]}, "is not a flag"),
        ({"flags": ["-D\n"]}, "is not a flag"),
        ({"flags": ["-D" + "x" * 200]}, "at most 200 characters"),
        ({"flags": ["-g"] * 51}, "There are 51 flags"),
        ({"flags": ["-o", "-x"]}, "Leave out the flag -o"),
        ({"flags": ["-oelsewhere"]}, "Leave out the flag -o"),
        ({"flags": ["--output=elsewhere"]}, "Leave out the flag --output=elsewhere: "),
        ({"sanitize": []}, "sanitize is a list of address, undefined, thread"),
        ({"sanitize": ["address", "thread"]}, "exclude each other"),
        ({"stdin": "x" * 2**20}, "Use fewer cases at once"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(options: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        request(**options).check_template(CPP)


@pytest.mark.parametrize("flag", ["-o", "-o=elsewhere", "--o=elsewhere"])
def test_go_refuses_flags_that_set_the_output_path(flag: str):
    with pytest.raises(BadRequest, match=f"Leave out the flag {flag}: "):
        request(flags=[flag]).check_template(GO)
    request(flags=["-overlay=files.json"]).check_template(GO)


def test_a_language_refuses_sanitizers_that_it_does_not_have():
    request(sanitize=["thread"]).check_template(GO)  # its race detector
    with pytest.raises(BadRequest, match="For Go, sanitize is a list of thread"):
        request(sanitize=["address"]).check_template(GO)
    with pytest.raises(BadRequest, match="There are no sanitizers for Java"):
        request(sanitize=["thread"]).check_template(JAVA)


def test_java_refuses_the_flag_that_sets_where_classes_go():
    request(flags=["-deprecation"]).check_template(JAVA)
    with pytest.raises(BadRequest, match="Leave out the flag -d: "):
        request(flags=["-d"]).check_template(JAVA)
