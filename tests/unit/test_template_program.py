"""Where the programs of drivers are downloaded from."""

from pathlib import Path

import pytest

from templates.chosen_program import FILE_NAME, ChosenPrograms
from templates.errors import UnreadableChoice
from templates.program import program_inputs
from vmm.drivers.gvisor import RUNSC


@pytest.mark.parametrize(
    ("host", "suite"), [("bullseye", "trixie"), ("bookworm", "trixie"), ("trixie", "trixie"), ("forky", "forky")]
)
def test_gvisor_comes_from_the_hosts_suite_or_the_first_one_with_a_new_release(
    monkeypatch: pytest.MonkeyPatch, host: str, suite: str
):
    monkeypatch.setattr("templates.apt_sources.host_codename", lambda etc=None: host)
    assert program_inputs(RUNSC)["suite"] == suite


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"runsc": 1}', b"\xff"])
def test_a_damaged_choice_of_programs_is_an_error_that_says_what_to_do(tmp_path: Path, content: bytes):
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(
        UnreadableChoice, match=r"programs\.json is damaged; remove it and run `mcp-sandbox setup --runsc`"
    ):
        ChosenPrograms(tmp_path).sha512_of(RUNSC)
