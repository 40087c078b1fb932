"""The line of each field in a TOML file, in every notation."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templates.toml_lines import Field, line_of, lines_of

WRITTEN = '''\
title = "T"  # [not.a.table]
"quoted \\u0041".'b.c' = 1
site."docs.example" = true
[source.debian]
wheels = [  # a comment, with a comma ] and brackets
  "one", "two",

  """three
  over = "lines" """,
  [1, { deep = 2 }],
]
machine = { memory_mb = 512, disk = { mb = "}" }, list = ["]"] }
code = """
[a.b]
c = "d" \\"""
"""""
raw = \'\'\'
# no comment\'\'\'\'
since = 1979-05-27 07:32:00
ratio = 1.5
[[cases]]
name = "first"
[[cases]]
[cases.limits]
time_s = 1
  [[cases.steps]]
  do = 1
  [[cases.steps]]
  do = 2
[ spaced . out ]
last=1'''


@pytest.mark.parametrize(
    ("field", "line"),
    [
        (("title",), 1),
        (("quoted A",), 2),
        (("quoted A", "b.c"), 2),
        (("site", "docs.example"), 3),
        (("source",), 4),
        (("source", "debian"), 4),
        (("source", "debian", "wheels"), 5),
        (("source", "debian", "wheels", 0), 6),
        (("source", "debian", "wheels", 1), 6),
        (("source", "debian", "wheels", 2), 8),
        (("source", "debian", "wheels", 3), 10),
        (("source", "debian", "wheels", 3, 1, "deep"), 10),
        (("source", "debian", "machine", "disk", "mb"), 12),
        (("source", "debian", "machine", "list", 0), 12),
        (("source", "debian", "code"), 13),
        (("source", "debian", "raw"), 17),
        (("source", "debian", "since"), 19),
        (("source", "debian", "ratio"), 20),
        (("cases",), 21),
        (("cases", 0, "name"), 22),
        (("cases", 1), 23),
        (("cases", 1, "limits", "time_s"), 25),
        (("cases", 1, "steps", 0, "do"), 27),
        (("cases", 1, "steps", 1, "do"), 29),
        (("spaced", "out", "last"), 31),
    ],
)
def test_a_field_is_found_on_its_line(field: Field, line: int):
    assert line_of(lines_of(WRITTEN), field) == line


def test_every_field_has_a_line():
    assert set(fields_of(tomllib.loads(WRITTEN))) == set(lines_of(WRITTEN))


@pytest.mark.parametrize(
    ("field", "line"), [(("nothing",), 1), (("source", "debian", "suite"), 4), (("cases", 1, "name"), 23)]
)
def test_a_missing_field_is_reported_at_its_table(field: Field, line: int):
    assert line_of(lines_of(WRITTEN), field) == line


def test_windows_line_endings_are_counted():
    assert line_of(lines_of(WRITTEN.replace("\n", "\r\n")), ("spaced", "out", "last")) == 31


def fields_of(value: Any, path: Field = ()) -> Iterator[Field]:
    """All tables, keys and elements of a value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from fields_of(inner, (*path, key))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from fields_of(inner, (*path, number))


# What people could write, piece by piece, with as many lines between as they like.
_words = st.text(alphabet="ab#[]{}=,.\"' \\\n", max_size=6)
_gap = st.sampled_from(["", " ", "\n", ' # [x] = "\n', "\n\n\t"])


def _basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _long(text: str) -> str:
    return '"""' + text.replace("\\", "\\\\").replace('"""', '""\\"') + '\n"""'


_scalars = st.one_of(st.integers().map(str), st.floats(0, 9).map(str), _words.map(_basic), _words.map(_long))


@st.composite
def _arrays(draw: st.DrawFn, elements: st.SearchStrategy[str]) -> str:
    inner = [draw(_gap) + element + draw(_gap) for element in draw(st.lists(elements, max_size=3))]
    return "[" + ",".join(inner) + draw(_gap) + "]"


def _inlines(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.dictionaries(_words.map(_basic), values.filter(lambda value: "\n" not in value), max_size=3)
    return pairs.map(lambda found: "{" + ", ".join(f"{key} = {value}" for key, value in found.items()) + "}")


_values = st.recursive(_scalars, lambda inner: _arrays(inner) | _inlines(inner), max_leaves=6)


@st.composite
def _files(draw: st.DrawFn) -> str:
    parts: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["[{}]", "[[{}]]", "[{}.deep]"]))
        header = kind.format(f"t{number}." + draw(st.sampled_from(["a", '"b.c"', "'d'"])))
        pairs = [f"k{key} = {draw(_values)}\n" for key in range(draw(st.integers(0, 3)))]
        parts.append(draw(_gap).rstrip(" ") + ("\n" if parts else "") + header + "\n" + "".join(pairs))
    return "".join(parts)


@given(_files())
def test_all_fields_of_any_file_are_found_in_order(text: str):
    lines = lines_of(text)
    assert set(lines) == set(fields_of(tomllib.loads(text)))
    for field, line in lines.items():
        name = field[-1]
        if isinstance(name, str) and name.startswith("k"):
            assert name in text.splitlines()[line - 1]
