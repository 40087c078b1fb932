"""Which templates there are, and how hidden and invalid ones are reported."""

from pathlib import Path

import pytest

from templates.catalogue import BUILT_IN, Catalogue
from templates.errors import InvalidTemplate, UnknownTemplate
from tests.unit.test_template_model import GOOD

SHIPPED = "python-data-analysis"


def add(root: Path, name: str, text: str = GOOD) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.toml").write_text(text)
    return folder


def test_custom_templates_are_listed_beside_the_built_in_ones(tmp_path: Path):
    add(tmp_path, "mine")
    catalogue = Catalogue([tmp_path])
    assert catalogue.load("mine").folder == tmp_path / "mine"
    assert catalogue.load(SHIPPED).folder == BUILT_IN / SHIPPED
    assert {"mine", SHIPPED} <= set(catalogue.names()) == set(catalogue.templates())


def test_a_directory_on_the_path_may_be_missing(tmp_path: Path):
    assert Catalogue([tmp_path / "nowhere"]).names() == Catalogue().names()


def test_the_first_template_of_a_name_hides_the_others(tmp_path: Path):
    for root in ("first", "second"):
        add(tmp_path / root, SHIPPED)
    catalogue = Catalogue([tmp_path / "first", tmp_path / "second"])
    assert catalogue.load(SHIPPED).folder == tmp_path / "first" / SHIPPED
    (listed,) = [entry for entry in catalogue.entries() if entry.name == SHIPPED]
    assert not listed.built_in
    assert listed.hides == (tmp_path / "second" / SHIPPED, BUILT_IN / SHIPPED)


def test_a_template_with_errors_does_not_affect_others(tmp_path: Path):
    add(tmp_path, "broken", "title =")
    add(tmp_path, "mine")
    catalogue = Catalogue([tmp_path])
    assert "mine" in catalogue.templates()
    assert "broken" not in catalogue.templates()
    (listed,) = [entry for entry in catalogue.entries() if entry.template is None]
    assert listed.name == "broken"
    assert f"{tmp_path}/broken/template.toml:1: this is not valid TOML" in str(listed.error)
    with pytest.raises(InvalidTemplate, match=r"template\.toml:1"):
        catalogue.load("broken")


def test_a_broken_template_is_not_replaced_by_the_one_it_hides(tmp_path: Path):
    add(tmp_path, SHIPPED, "title =")
    with pytest.raises(InvalidTemplate):
        Catalogue([tmp_path]).load(SHIPPED)


def test_a_directory_with_an_invalid_name_is_reported(tmp_path: Path):
    add(tmp_path, "My_Tools")
    catalogue = Catalogue([tmp_path])
    (entry,) = [entry for entry in catalogue.entries() if entry.name == "My_Tools"]
    assert str(entry.error).startswith(f"{tmp_path}/My_Tools: rename the directory: a template's name has up to 63")
    assert "My_Tools" not in catalogue.names()


def test_added_changed_and_removed_templates_are_noticed(tmp_path: Path):
    catalogue = Catalogue([tmp_path])
    folder = add(tmp_path, "mine")
    first = catalogue.load("mine")
    assert catalogue.load("mine") is first, "it is cached"
    add(tmp_path, "mine", GOOD.replace("512", "1024"))
    assert catalogue.load("mine").machine.memory_mb == 1024
    (folder / "template.toml").unlink()
    with pytest.raises(UnknownTemplate):
        catalogue.load("mine")


@pytest.mark.parametrize("name", ["nothing-here", "../mine", "", "UPPER", "a" * 64, "file"])
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, name: str):
    add(tmp_path / "path", "mine")
    add(tmp_path, "mine")
    (tmp_path / "path" / "file").write_text("")
    with pytest.raises(UnknownTemplate, match=r"choose one of: .*mine, "):
        Catalogue([tmp_path / "path"]).load(name)
