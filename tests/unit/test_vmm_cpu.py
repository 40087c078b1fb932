"""What counts as the same model of CPU."""

from pathlib import Path

import pytest

from vmm import cpu

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) CPU @ 2.20GHz
stepping\t: 7
flags\t\t: fpu tsc sse sse2 avx2 avx512f rtm ibrs

processor\t: 1
model\t\t: 1
"""


def model(folder: Path, text: str) -> str:
    file = folder / "cpuinfo"
    file.write_text(text)
    return cpu.model(file)


def test_a_model_is_named_as_its_maker_does(tmp_path: Path):
    assert model(tmp_path, CPUINFO).startswith("Intel(R) Xeon(R) CPU @ 2.20GHz, 6-85-7, instructions ")


@pytest.mark.parametrize(
    ("was", "now"),
    [("85", "106"), ("stepping\t: 7", "stepping\t: 4"), (" rtm", ""), ("sse2 ", "sse2 sse4_2 ")],
    ids=["another number", "another stepping", "an instruction less", "an instruction more"],
)
def test_a_cpu_of_the_same_name_can_be_another_model(was: str, now: str, tmp_path: Path):
    assert model(tmp_path, CPUINFO) != model(tmp_path, CPUINFO.replace(was, now))


def test_what_a_newer_kernel_says_of_itself_does_not_make_another_model(tmp_path: Path):
    newer = CPUINFO.replace("avx2 avx512f rtm ibrs", "avx512f avx2 rtm ibrs ibpb_exit_to_user")
    assert model(tmp_path, CPUINFO) == model(tmp_path, newer)


def test_a_host_that_does_not_describe_its_cpu_has_a_model_all_the_same(tmp_path: Path):
    assert model(tmp_path, "") == model(tmp_path, "\n")
