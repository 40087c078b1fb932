"""What fetch_url keeps for owners: each has its own, up to a number, a size and an age."""

import pytest

from mcp_sandbox.errors import ArtifactNotFound
from mcp_sandbox.web.artifacts import MAX_ARTIFACTS, OWNERS, Artifact, WebArtifacts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def artifact(number: int, size: int = 10) -> Artifact:
    return Artifact(f"http://site.example/{number}", "a.bin", bytes(size), is_text=False)


def kept(artifacts: WebArtifacts, owner: str, numbers: range) -> list[int]:
    """The numbers of the artifacts that an owner still has."""
    found = []
    for number in numbers:
        try:
            artifacts.get(owner, artifact(number).id)
        except ArtifactNotFound:
            continue
        found.append(number)
    return found


def test_the_id_of_another_owners_artifact_is_unknown():
    artifacts = WebArtifacts(60, 100)
    assert artifacts.put("ada", artifact(1))
    assert artifacts.get("ada", artifact(1).id) == artifact(1)
    with pytest.raises(ArtifactNotFound):
        artifacts.get("bob", artifact(1).id)


def test_an_artifact_is_gone_after_its_time():
    clock = Clock()
    artifacts = WebArtifacts(60, 100, clock)
    artifacts.put("ada", artifact(1))
    clock.now = 60
    assert kept(artifacts, "ada", range(2)) == []
    assert artifacts.bytes == 0


def test_an_owner_keeps_the_newest_that_fit():
    artifacts = WebArtifacts(60, 100)
    assert not artifacts.put("ada", artifact(0, 101))
    for number in range(1, 4):
        assert artifacts.put("ada", artifact(number, 40))
    assert kept(artifacts, "ada", range(5)) == [2, 3]
    assert artifacts.bytes == 80


def test_an_owner_keeps_so_many_and_no_more():
    artifacts = WebArtifacts(60, 10**6)
    for number in range(MAX_ARTIFACTS + 3):
        artifacts.put("ada", artifact(number))
    assert kept(artifacts, "ada", range(MAX_ARTIFACTS + 3))[0] == 3


def test_the_same_page_is_kept_once():
    artifacts = WebArtifacts(60, 100)
    for _ in range(3):
        artifacts.put("ada", artifact(1))
    assert artifacts.bytes == 10


def test_many_owners_together_have_a_limit_and_the_largest_one_pays():
    artifacts = WebArtifacts(60, 100)
    artifacts.put("small", artifact(0))
    for number in range(OWNERS):
        artifacts.put(f"large-{number}", artifact(number, 99))
    assert artifacts.bytes <= OWNERS * 100
    assert kept(artifacts, "small", range(1)) == [0]


def test_nothing_is_kept_without_time():
    assert not WebArtifacts(0, 100).put("ada", artifact(1))
