"""What a template.toml may say, and what people are told when it says something else."""

from pathlib import Path

import pytest

from templates.errors import InvalidTemplate, UnknownTemplate
from templates.model import Template, find_templates, load_template

GOOD = """
title = "T"
description = "D"
language = "python"
[source.debian]
suite = "bookworm"
wheels = ["numpy==2.4.6"]
[machine]
memory_mb = 512
disk_mb = 1024
"""


def load(root: Path, text: str, name: str = "some-name") -> Template:
    (root / name).mkdir()
    (root / name / "template.toml").write_text(text)
    return load_template(name, root)


def test_a_template_is_called_what_its_directory_is_called(tmp_path: Path):
    template = load(tmp_path, GOOD)
    assert template.name == "some-name"
    assert template.machine.vcpus == 1
    assert find_templates(tmp_path) == {"some-name": template}


def test_a_template_that_was_changed_is_read_again(tmp_path: Path):
    first = load(tmp_path, GOOD)
    assert load_template("some-name", tmp_path) is first
    (tmp_path / "some-name" / "template.toml").write_text(GOOD.replace("512", "1024"))
    assert load_template("some-name", tmp_path).machine.memory_mb == 1024


@pytest.mark.parametrize("mode", ["pooled", "cold", "singleton"])
def test_a_template_says_whether_machines_of_it_are_kept_ready(tmp_path: Path, mode: str):
    assert load(tmp_path, f'pool = "{mode}"\n{GOOD}').pool == mode


def test_machines_are_kept_ready_unless_a_template_says_otherwise(tmp_path: Path):
    assert load(tmp_path, GOOD).pool == "pooled"


def test_the_templates_we_ship_are_valid():
    template = find_templates()["python-data-analysis"]
    assert template.machine.memory_mb == 512
    compile(template.warmup.code, "warmup", "exec")


@pytest.mark.parametrize("name", ["nothing-here", "../etc", "", "UPPER", "a" * 64])
def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path: Path, name: str):
    load(tmp_path, GOOD, "only-one")
    with pytest.raises(UnknownTemplate, match="there are: only-one"):
        load_template(name, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('language = "python"', 'language = "cobol"', "language: Input should be 'python'"),
        ('title = "T"', "", "title: this field is required"),
        ('title = "T"', 'titel = "T"', "titel: there is no such field"),
        ('title = "T"', 'title = "T"\nname = "x"', "name: remove it"),
        ("memory_mb = 512", "memory_mb = 5", "machine.memory_mb: Input should be greater than or equal to 128"),
        ("memory_mb = 512", 'memory_mb = "512"', "machine.memory_mb: Input should be a valid integer"),
        ("memory_mb = 512", "memory_mb = 512\nram = 1", "machine.ram: there is no such field"),
        ('title = "T"', 'title = "T"\npool = "hot"', "pool: Input should be 'pooled', 'cold' or 'singleton'"),
        ('suite = "bookworm"', 'suite = "woody"', "source.debian.suite: Input should be 'bookworm' or"),
        ("numpy==2.4.6", "numpy>=2", "source.debian.wheels.0: 'numpy>=2' must name one exact version"),
        ("numpy==2.4.6", "--index-url=x==1", "must name one exact version"),
        ("[machine]", 'packages = ["-o x"]\n[machine]', "source.debian.packages.0:"),
        ("[machine]", "[machine", "this is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_and_field(tmp_path: Path, old: str, new: str, complaint: str):
    with pytest.raises(InvalidTemplate) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert str(tmp_path / "some-name" / "template.toml") in str(caught.value)
    assert complaint in str(caught.value)


def test_all_mistakes_are_named_at_once(tmp_path: Path):
    with pytest.raises(InvalidTemplate) as caught:
        load(tmp_path, GOOD.replace("memory_mb = 512", "").replace('title = "T"', ""))
    assert len(str(caught.value).splitlines()) == 2
