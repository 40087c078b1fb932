"""Updates: what is rebuilt when the archive has newer packages, and what stays as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from mcp_sandbox.commands import template_update
from mcp_sandbox.config import Settings
from templates.build import Builder
from templates.locks import hold
from templates.model import Template
from templates.private_apt import Upgrade
from templates.revisions import Revisions, next_revision
from templates.update import Update, changed, find_updates
from tests.unit.test_template_build import (
    MINE,
    FakeAgent,
    FakeGvisor,
    FakeVm,
    Shop,
    Workshop,
    agent,
    shop,
    workshop,
)

__all__ = ["agent", "shop", "workshop"]  # fixtures

pytestmark = pytest.mark.anyio

NEWER_LIBC = "Inst libc6 [2.36-8] (2.36-9 Debian:12.15/oldstable [amd64]) [libc-bin:amd64 ]"
WITH_JQ = MINE.replace("wheels", 'packages = ["jq"], wheels')


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


async def updates_of(shop: Shop, workshop: Workshop, work: Path, *templates: Template) -> list[Update]:
    tools = workshop.tools(shop.store.logs / "update.log", lambda _line: None)
    scratch = work / str(len(list(work.iterdir())))
    scratch.mkdir()
    return await find_updates(shop.store, shop.builder.inventory, templates, tools, scratch)


def pending_builder(shop: Shop, workshop: Workshop, updates: Sequence[Update]) -> Builder:
    revisions = Revisions(shop.store.home, {update.key: update.revision for update in updates})
    return Builder(shop.store, make_tools=workshop.tools, catalogue=shop.catalogue, revisions=revisions)


# -- the decision ------------------------------------------------------------------------------------------


async def test_nothing_is_updated_while_the_archive_has_nothing_newer(shop: Shop, workshop: Workshop, work: Path):
    built = await shop.build("mine", FakeVm())
    workshop.simulated = ["Reading package lists...", "Inst tzdata (2026f Debian:12 [all])"]  # a new dependency only
    assert await updates_of(shop, workshop, work, built.template) == []


async def test_newer_packages_of_a_base_are_an_update_of_the_base(shop: Shop, workshop: Workshop, work: Path):
    built = await shop.build("mine", FakeGvisor())
    workshop.simulated = [NEWER_LIBC]
    (update,) = await updates_of(shop, workshop, work, built.template)
    assert update.part == "Debian bookworm"
    assert update.upgrades == (Upgrade("libc6", "2.36-8", "2.36-9"),)


async def test_a_base_that_templates_share_is_checked_once(shop: Shop, workshop: Workshop, work: Path):
    one, two = await shop.build("one", FakeGvisor()), await shop.build("two", FakeGvisor())
    workshop.ran.clear()
    assert await updates_of(shop, workshop, work, one.template, two.template) == []
    assert workshop.ran == ["apt-get", "tar", "apt-get"]


async def test_newer_packages_of_a_layer_leave_the_base_alone(
    shop: Shop, workshop: Workshop, work: Path, monkeypatch: pytest.MonkeyPatch
):
    built = await shop.build("mine", FakeGvisor(), WITH_JQ)
    answers = iter([[], ["Inst jq [1.6-2] (1.6-3 Debian:12 [amd64])"]])  # for the base, then for the layer

    async def upgrades(_apt: Any, _status: Path, _suite: str) -> list[Upgrade]:
        return [Upgrade("jq", "1.6-2", "1.6-3")] if next(answers) else []

    monkeypatch.setattr("templates.private_apt.PrivateApt.upgrades", upgrades)
    (update,) = await updates_of(shop, workshop, work, built.template)
    assert update.part == "the packages of mine"
    workshop.ran.clear()
    await pending_builder(shop, workshop, [update]).build_image(built.template)
    assert workshop.ran.count("mmdebstrap") == 1, "only the layer"


async def test_a_new_kernel_is_an_update(shop: Shop, workshop: Workshop, work: Path):
    built = await shop.build("mine", FakeVm())
    workshop.newest = ["linux_6.2_amd64"]
    (update,) = await updates_of(shop, workshop, work, built.template)
    assert (update.part, update.upgrades) == ("the guest kernel", (Upgrade("linux", "6.1", "6.2"),))


async def test_a_base_that_is_no_longer_stored_is_made_again(shop: Shop, workshop: Workshop, work: Path):
    built = await shop.build("mine", FakeGvisor())
    (base,) = [entry for entry in shop.store.entries() if entry.kind == "base"]
    await shop.store.remove("base", base.key)
    (update,) = await updates_of(shop, workshop, work, built.template)
    assert update.upgrades == ()


def test_packages_are_compared_by_name_and_version():
    stored = ["busybox-static_1%3a1.35.0-4_amd64", "linux-image-6.1.0-54-cloud-amd64_6.1.190-1_amd64"]
    assert changed(stored, stored) == []
    newest = ["busybox-static_1%3a1.35.0-5_amd64", "linux-image-6.1.0-55-cloud-amd64_6.1.195-1_amd64"]
    assert changed(stored, newest) == [
        Upgrade("busybox-static", "1:1.35.0-4", "1:1.35.0-5"),
        Upgrade("linux-image-6.1.0-55-cloud-amd64", "", "6.1.195-1"),
    ]
    assert changed([*stored, "patchelf_1_amd64"], stored) == [], "only a tool of the build"


# -- revisions ---------------------------------------------------------------------------------------------


def test_without_a_revision_the_inputs_and_keys_stay_as_they_are(tmp_path: Path):
    inputs = {"suite": "bookworm"}
    assert Revisions(tmp_path).apply(inputs) == inputs


def test_the_same_changes_give_the_same_revision_until_it_is_current():
    changes = [("libc6", "1", "2")]
    first = next_revision(None, changes)
    assert first == next_revision(None, changes), "a repeated attempt finds what the failed one has built"
    assert first != next_revision(first, changes), "a build that did not bring the new version is built again"


async def test_pending_revisions_change_nothing_until_they_are_saved(shop: Shop, workshop: Workshop, work: Path):
    before = await shop.build("mine", FakeGvisor())
    stamp = shop.builder.stamp()
    workshop.simulated = [NEWER_LIBC]
    new = pending_builder(shop, workshop, await updates_of(shop, workshop, work, before.template))
    assert await new.find(before.template, FakeGvisor()) is None
    after = await new.build(before.template, FakeGvisor())
    assert await shop.builder.find(before.template, FakeGvisor()) == before
    new.inventory.revisions.save()
    assert await shop.builder.find(before.template, FakeGvisor()) == after
    assert after.version != before.version, "pools have to replace their machines"
    assert shop.builder.stamp() != stamp, "running servers have to notice"
    workshop.simulated = []
    assert await updates_of(shop, workshop, work, before.template) == []


async def test_the_previous_build_stays_as_long_as_machines_use_it(shop: Shop, workshop: Workshop, work: Path):
    before = await shop.build("mine", FakeGvisor())
    workshop.simulated = [NEWER_LIBC]
    new = pending_builder(shop, workshop, await updates_of(shop, workshop, work, before.template))
    await new.build(before.template, FakeGvisor())
    new.inventory.revisions.save()
    with hold(before.entries()):
        outdated = await new.outdated(before.template, FakeGvisor())
        removed = {entry.kind: await shop.store.remove(entry.kind, entry.key) for entry in outdated}
    assert removed == {"base": "removed", "image": "in use", "snapshot": "in use"}
    assert before.exists()


# -- the command -------------------------------------------------------------------------------------------


class FakeDrivers:
    """Drivers of a host on which only a pretended gVisor works."""

    def __init__(self, shop: Shop, workshop: Workshop, pending: Any = None) -> None:
        self.store = shop.store
        self.builder = Builder(
            shop.store,
            make_tools=workshop.tools,
            catalogue=shop.catalogue,
            revisions=Revisions(shop.store.home, pending),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def load(self, _name: str) -> FakeGvisor:
        return FakeGvisor()

    async def fetch_and_probe(self, _name: str) -> None: ...


@pytest.fixture
def settings(shop: Shop, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Settings:
    async def only_gvisor(_drivers: FakeDrivers) -> list[FakeGvisor]:
        return [FakeGvisor()]

    monkeypatch.setattr(
        template_update, "Drivers", lambda _settings, _report=None, pending=None: FakeDrivers(shop, workshop, pending)
    )
    monkeypatch.setattr(template_update, "usable_drivers", only_gvisor)
    monkeypatch.setattr(template_update, "LoggedTools", workshop.tools)
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(shop.store.home))
    monkeypatch.setenv("MCP_SANDBOX_TEMPLATE_PATH", str(shop.path / "templates"))
    return Settings()


@pytest.fixture
def _two_templates(shop: Shop, agent: type[FakeAgent]) -> None:
    async def build() -> None:
        await shop.build("mine", FakeGvisor())
        await shop.build("other", FakeGvisor(), MINE.replace("import numpy", "import re"))
        shop.write("unbuilt", MINE.replace("import numpy", "import os"))

    anyio.run(build)


def found(shop: Shop, name: str) -> bool:
    return anyio.run(shop.builder.find, shop.catalogue.load(name), FakeGvisor()) is not None


@pytest.mark.usefixtures("_two_templates")
def test_the_command_builds_nothing_if_everything_is_up_to_date(
    settings: Settings, workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    workshop.ran.clear()
    assert template_update.update(settings, ["mine"], every=False, dry_run=False) == 0
    assert "Everything is up to date" in capsys.readouterr().err
    assert "mmdebstrap" not in workshop.ran


@pytest.mark.usefixtures("_two_templates")
def test_a_dry_run_shows_the_packages_and_builds_nothing(
    settings: Settings, workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    workshop.simulated, workshop.ran = [NEWER_LIBC], []
    assert template_update.update(settings, ["mine"], every=False, dry_run=True) == 0
    assert "libc6 2.36-8 → 2.36-9" in capsys.readouterr().err
    assert "mmdebstrap" not in workshop.ran


@pytest.mark.usefixtures("_two_templates")
def test_templates_that_share_an_updated_base_are_rebuilt_and_unbuilt_ones_are_not(
    settings: Settings, workshop: Workshop, shop: Shop, capsys: pytest.CaptureFixture[str]
):
    workshop.simulated, workshop.ran = [NEWER_LIBC], []
    assert template_update.update(settings, ["mine"], every=False, dry_run=False) == 0
    assert workshop.ran.count("mmdebstrap") == 1
    assert [name for name in ("mine", "other", "unbuilt") if found(shop, name)] == ["mine", "other"]
    printed = capsys.readouterr().err
    assert "Template mine is updated" in printed
    assert "Template other is updated" in printed
    kinds = sorted(entry.kind for entry in shop.store.entries())
    assert kinds == ["agent", "base", "image", "snapshot", "snapshot"], "the previous ones are removed"


@pytest.mark.usefixtures("_two_templates")
def test_a_failed_rebuild_keeps_the_previous_builds(
    settings: Settings, workshop: Workshop, shop: Shop, capsys: pytest.CaptureFixture[str]
):
    workshop.simulated, workshop.broken = [NEWER_LIBC], "pip"
    assert template_update.update(settings, ["mine"], every=False, dry_run=False) == 1
    assert "Nothing was updated" in capsys.readouterr().err
    assert found(shop, "mine")
    assert not (shop.store.home / "revisions.json").exists()
