"""Errors are data: every code has a meaning, a sentence, and a next step in every face."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path

import pytest

import mcp_sandbox
from mcp_sandbox.commands import next_steps as cli
from mcp_sandbox.errors import (
    FetchError,
    FileError,
    LimitReached,
    MachineLost,
    NetworkRefused,
    SandboxBusy,
    SandboxError,
    UnusableTemplate,
    error_types,
)
from mcp_sandbox.rest import next_steps as rest
from mcp_sandbox.tools import next_steps as mcp
from mcp_sandbox.views import with_next_step
from tests.unit.test_docs import server_tools

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "mcp_sandbox"
ABSTRACT = {SandboxError, LimitReached, NetworkRefused, FetchError, FileError}


def error_types_of_the_product() -> set[type[SandboxError]]:
    """All error classes, in whatever module they are defined, but not those of tests."""
    for module in pkgutil.walk_packages(mcp_sandbox.__path__, "mcp_sandbox."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return {kind for kind in error_types() if kind.__module__.startswith("mcp_sandbox.")}


RAISED = sorted(error_types_of_the_product() - ABSTRACT, key=lambda kind: kind.code)


def example(kind: type[SandboxError]) -> SandboxError:
    """An error with made-up values in all fields."""
    made_up: dict[str, object] = {
        "known": ["a"],
        "allowed": ["a"],
        "others": ["run-2"],
        "elapsed_s": 1.5,
        "limit_s": 1.5,
        "skew_s": 1.5,
        "waited_s": 1.5,
    }
    values = {
        field.name: made_up.get(field.name, 7 if field.type in (int, "int") else f"the {field.name}")
        for field in fields(kind)
    }
    return kind(**values)


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.code)
def test_an_error_has_a_code_a_meaning_and_a_sentence(kind: type[SandboxError]):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", kind.code)
    assert (kind.__doc__ or "").strip()
    text = str(example(kind))
    assert text[0].isupper() or text.startswith("the ")  # a field


async def test_no_sentence_names_a_tool_or_a_command():
    names = {*await server_tools(), "mcp-sandbox"}
    wrong = {kind.code: name for kind in RAISED for name in names if name in str(example(kind))}
    assert wrong == {}


def test_no_two_errors_share_a_code():
    assert len({kind.code for kind in RAISED}) == len(RAISED)


@pytest.mark.parametrize("face", [mcp.NEXT_STEPS, cli.NEXT_STEPS, rest.NEXT_STEPS], ids=["mcp", "cli", "rest"])
def test_every_face_has_words_for_every_code_and_no_others(face: Mapping[str, tuple[str, ...]]):
    assert set(face) == {kind.code for kind in RAISED}
    for kind in RAISED:
        error = example(kind)  # all of its fields have values, so no advice may be left out
        steps = [step.format(**error.fields) for step in face[kind.code]]
        assert with_next_step(error, face).split() == " ".join([str(error), *steps]).split()


def test_every_code_has_an_http_status_of_an_error():
    assert set(rest.STATUSES) == {kind.code for kind in RAISED}
    assert all(400 <= HTTPStatus(status) < 600 for status in rest.STATUSES.values())


def table() -> Iterator[tuple[str, ...]]:
    """The table that docs/errors.md has."""
    for kind in RAISED:
        meaning = (kind.__doc__ or "").split("\n")[0]
        faces = (mcp.NEXT_STEPS, cli.NEXT_STEPS, rest.NEXT_STEPS)
        words = [" ".join(face[kind.code]) or "—" for face in faces]
        yield f"`{kind.code}`", meaning, str(rest.STATUSES[kind.code]), *words


def test_the_documented_table_shows_every_code_its_meaning_and_each_faces_words():
    rows = [f"| {' | '.join(row)} |" for row in table()]
    documented = (ROOT / "docs" / "errors.md").read_text().splitlines()
    assert [line for line in documented if line.startswith("| `")] == rows


def test_advice_that_needs_a_field_the_error_lacks_is_left_out():
    without = with_next_step(MachineLost("sb-1", "signal 9"), mcp.NEXT_STEPS)
    assert without.endswith("Call create_sandbox to get a new one.")
    last_output = 'read_output(sandbox_id="sb-1", run_id="run-2").'
    assert with_next_step(MachineLost("sb-1", "signal 9", "run-2"), mcp.NEXT_STEPS).endswith(last_output)


def test_the_next_step_after_several_lines_has_its_own_line():
    shown = with_next_step(UnusableTemplate("mine", "template.toml:1: wrong"), cli.NEXT_STEPS)
    assert shown.endswith("template.toml:1: wrong\nCorrect template.toml.")


def test_a_value_with_braces_is_shown_as_it_is():
    assert "{oops}" in with_next_step(SandboxBusy("sb-1", "{oops}", 1), mcp.NEXT_STEPS)


def test_errors_carry_their_fields():
    fields = {"sandbox_id": "sb-1", "run_id": "run-2", "elapsed_s": 12.4, "others": []}
    assert SandboxBusy("sb-1", "run-2", 12.4).fields == fields


def made_in(file: Path) -> set[str]:
    """The names of all classes and functions that a file calls, and of classes that it raises without a call."""
    tree = list(ast.walk(ast.parse(file.read_text())))
    called = [node.func for node in tree if isinstance(node, ast.Call)]
    raised = [node.exc for node in tree if isinstance(node, ast.Raise)]
    names = [node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in (*called, *raised)]
    return set(names)


def test_only_specific_errors_are_raised():
    abstract = {kind.__name__ for kind in ABSTRACT}
    wrong = {file.name: names for file in PRODUCT.rglob("*.py") if (names := made_in(file) & abstract)}
    assert wrong == {}
