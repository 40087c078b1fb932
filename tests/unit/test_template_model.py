"""What a template.toml may contain, and the errors for everything else."""

from pathlib import Path

import pytest

from templates.catalogue import Catalogue
from templates.errors import InvalidTemplate
from templates.model import Template
from templates.snapshot import size_inputs

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
    return Catalogue([root]).load(name)


def test_a_template_is_named_after_its_directory(tmp_path: Path):
    template = load(tmp_path, GOOD)
    assert template.name == "some-name"
    assert template.folder == tmp_path / "some-name"
    assert template.machine.vcpus == 1


@pytest.mark.parametrize("mode", ["pooled", "cold"])
def test_a_template_sets_whether_its_machines_are_pooled(tmp_path: Path, mode: str):
    assert load(tmp_path, f'pool = "{mode}"\n{GOOD}').pool == mode


def test_machines_are_pooled_by_default(tmp_path: Path):
    assert load(tmp_path, GOOD).pool == "pooled"


def test_a_template_limits_how_fast_its_machines_use_their_disks(tmp_path: Path):
    machine = load(tmp_path, f"{GOOD}disk_mb_per_s = 50\ndisk_iops = 1000\n").machine
    assert (machine.disk_mb_per_s, machine.disk_iops) == (50, 1000)


def test_snapshots_depend_on_limits_of_disks_only_if_there_are_some(tmp_path: Path):
    plain, limited = load(tmp_path, GOOD), load(tmp_path, f"{GOOD}disk_iops = 1000\n", "limited")
    assert size_inputs(plain) == {"memory_mb": 512, "vcpus": 1, "disk_mb": 1024}
    assert size_inputs(limited) == {**size_inputs(plain), "disk_iops": 1000}


def test_the_built_in_templates_are_valid():
    template = Catalogue().load("python-data-analysis")
    assert template.machine.memory_mb == 1024
    compile(template.warmup.code, "warmup", "exec")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            'language = "python"',
            'language = "cobol"',
            "4: language: Input should be 'cpp', 'go', 'java', 'javascript', 'python', 'r' or 'shell'",
        ),
        ('title = "T"', "", "1: title: this field is required"),
        ('title = "T"', 'titel = "T"', "2: titel: there is no such field"),
        ('title = "T"', 'title = "T"\nname = "x"', "3: name: remove it"),
        ('title = "T"', 'title = "T"\nfolder = "x"', "3: folder: remove it"),
        ("memory_mb = 512", "memory_mb = 5", "9: machine.memory_mb: Input should be greater than or equal to 128"),
        ("memory_mb = 512", 'memory_mb = "512"', "9: machine.memory_mb: Input should be a valid integer"),
        ("memory_mb = 512", "memory_mb = 512\nram = 1", "10: machine.ram: there is no such field"),
        (
            "disk_mb = 1024",
            "disk_mb = 1024\ndisk_iops = 0",
            "11: machine.disk_iops: Input should be greater than or equal",
        ),
        ("memory_mb = 512", "", "8: machine.memory_mb: this field is required"),
        ('title = "T"', 'title = "T"\npool = "hot"', "3: pool: Input should be 'pooled' or 'cold'"),
        ('suite = "bookworm"', 'suite = "woody"', "6: source.debian.suite: Input should be 'bookworm' or"),
        ("numpy==2.4.6", "numpy>=2", "7: source.debian.wheels[0]: 'numpy>=2' must name one exact version"),
        ('"numpy==2.4.6"', '\n"a==1", # one\n"b"\n', "9: source.debian.wheels[1]: 'b' must name one exact version"),
        ("numpy==2.4.6", "--index-url=x==1", "must name one exact version"),
        ("[machine]", 'packages = ["-o x"]\n[machine]', "8: source.debian.packages[0]: '-o x' must name a package"),
        ("[machine]", 'packages = ["jq/sid"]\n[machine]', "8: source.debian.packages[0]:"),
        ("[machine]", 'run = [""]\n[machine]', "8: source.debian.run[0]:"),
        ('title = "T"', 'title = "T"\nsource.oci = "a:b"', "3: source: give exactly one of debian, oci, dockerfile"),
        ('title = "T"', 'title = "T"\nsource.oci = "-x"', "3: source.oci: '-x' must name an image"),
        ('title = "T"', 'title = "T"\nsource.dockerfile = "../D"', "3: source.dockerfile: '../D' must name a file"),
        ("[source.debian]", "source.debian = 1\n[other]", "5: source.debian: this must be a table"),
        ('title = "T"', 'title = "T"\nenv = { A = "1",  "B C" = "2" }', "3: env.B C: 'B C' must be a variable's name"),
        ("[machine]", "[machine", "8: this is not valid TOML: Expected ']' at the end of a table declaration"),
        ("disk_mb = 1024", "disk_mb = [1024", "10: this is not valid TOML: Unclosed array"),
        ('title = "T"', 'title = "T"\ntitle = "U"', "3: this is not valid TOML: Cannot overwrite a value"),
        (
            'language = "python"',
            'language = "r"\nwarmup.rehearsal = "x <- 1"',
            "warmup.rehearsal: r sandboxes would keep what it leaves behind",
        ),
        ("memory_mb = 512", f"memory_mb = {'[' * 100_000}", "this is not valid TOML"),
    ],
)
def test_an_error_has_file_line_and_field(tmp_path: Path, old: str, new: str, complaint: str):
    with pytest.raises(InvalidTemplate) as caught:
        load(tmp_path, GOOD.replace(old, new))
    file = tmp_path / "some-name" / "template.toml"
    assert str(caught.value).startswith(f"{file}:")
    assert complaint in str(caught.value)


def test_a_file_that_is_not_utf_8_is_reported_with_its_line(tmp_path: Path):
    (tmp_path / "some-name").mkdir()
    (tmp_path / "some-name" / "template.toml").write_bytes(b"title = 1\n\xff\n")
    with pytest.raises(InvalidTemplate, match=r"template\.toml:2: this is not UTF-8"):
        Catalogue([tmp_path]).load("some-name")


def test_all_errors_are_reported_at_once_in_file_order(tmp_path: Path):
    with pytest.raises(InvalidTemplate) as caught:
        load(tmp_path, GOOD.replace("memory_mb = 512", "").replace('title = "T"', "") + "ram = 2\n")
    lines = [line.removeprefix(f"{tmp_path}/some-name/template.toml:") for line in str(caught.value).splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        ["1", "title"],
        ["8", "machine.memory_mb"],
        ["11", "machine.ram"],
    ]
