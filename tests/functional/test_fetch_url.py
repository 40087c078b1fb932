"""fetch_url with a real machine: pages are fetched and read in it, and downloads end up in sandboxes."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app import Host
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import ArtifactNotFound, FetchDns, FetchRefused, FetchTls, FetchTooLarge
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.web import TEMPLATE, WebMachines
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.web.fetching import FetchRequest
from mcp_sandbox.web.opening import open_web
from templates.build import BuiltTemplate
from tests.functional.machines import only
from tests.unit.test_web_extraction import LONG, page, pdf
from tests.waiting import HANG_S
from tests.web.sites import Page, pages
from tests.web.world import NETWORKS, World, forget_proxies
from websearch.surroundings import surroundings

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]

ME = "ada"
TABLE = b"city,people\nUlm,128928\nAalen,68816\n"
HTML = {"Content-Type": "text/html"}
SITE = {
    "/": Page(page("<p hidden>SECRET</p><script>SECRET</script>", "<title>Foxes</title>"), headers=HTML),
    "/pdf": Page(pdf("A page of a report"), headers={"Content-Type": "application/pdf"}),
    "/cities.csv": Page(TABLE, headers={"Content-Type": "text/csv"}),
    "/data.json": Page(json.dumps({"a": 1}).encode(), headers={"Content-Type": "application/json"}),
    "/there": Page(status="302 Found", headers={"Location": "/data.json"}),
    "/inside": Page(status="302 Found", headers={"Location": "http://192.168.0.1/"}),
    "/archive.bin": Page(bytes(range(256)) * 10, headers={"Content-Type": "application/octet-stream"}),
    "/large": Page(b"x" * 3_000_000, headers={"Content-Type": "text/plain"}),
}


class Sites(World):
    """The world of these tests, and the service that reaches it."""

    plain: str
    secure: str
    service: SandboxService


@pytest.fixture
async def sites(
    host: Host, built: BuiltTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sites]:
    """A service whose template for the web is built, on a host that only knows the sites of the test."""
    forget_proxies(monkeypatch)
    await host.builder.build(host.settings.catalogue.load(TEMPLATE), host.driver)
    sites = Sites()
    authority = tmp_path / "authority.pem"
    authority.write_bytes(sites.authority_pem)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sites.plain = await enter(sites.site("plain.example", pages(SITE)))
        sites.secure = await enter(sites.site("secure.example", pages(SITE), secure=True))
        web = {
            "ports": sorted({80, 443, *sites.ports}),
            "private_networks": NETWORKS,
            "ca_file": authority,
            "max_bytes": 2_000_000,
            "timeout_s": HANG_S,
        }
        settings = Settings.model_validate({"home": host.settings.home, "web": web})
        builds = Builds(host.driver, host.builder, settings.catalogue)
        provider = LocalProvider(host.driver, builds, max_restores=2, run_dir=settings.run_dir)
        await enter(provider)
        opening = open_web(settings.web, WebMachines(provider), surroundings, sites.accesses.append, sites.resolve)
        sites.service = await enter(SandboxService(provider, settings, web=await enter(opening)))
        yield sites


async def text_of(sites: Sites, url: str) -> str:
    view, _ = await sites.service.fetch(ME, FetchRequest(url=url), None)
    assert view.text is not None
    return view.text


async def test_pages_of_all_kinds_are_read_in_the_machine(sites: Sites):
    html = await text_of(sites, f"{sites.secure}/")
    assert LONG.strip() in html
    assert "SECRET" not in html
    assert await text_of(sites, f"{sites.plain}/pdf") == "A page of a report"
    assert (await text_of(sites, f"{sites.plain}/cities.csv")).startswith("| city | people |")
    assert await text_of(sites, f"{sites.secure}/there") == '{\n  "a": 1\n}'


async def test_what_must_not_be_fetched_is_an_error_of_its_own(sites: Sites):
    for url, error in (
        (f"{sites.plain}/inside", FetchRefused),
        ("http://169.254.169.254/latest/meta-data", FetchRefused),
        ("http://nowhere.example/", FetchDns),
        (f"{sites.plain}/large", FetchTooLarge),
    ):
        with pytest.raises(error):
            await text_of(sites, url)
    sites.names["other.example"] = ["127.0.0.1"]
    with pytest.raises(FetchTls):
        await text_of(sites, f"{sites.secure}/".replace("secure", "other"))
    assert {"address-private", "address-metadata", "dns"} <= set(sites.rules)


async def test_a_download_becomes_a_file_that_code_in_an_offline_sandbox_reads(sites: Sites):
    box = await sites.service.create(ME)
    view, _ = await sites.service.fetch(ME, FetchRequest(url=f"{sites.secure}/cities.csv"), box.sandbox_id)
    assert view.saved is not None
    code = f"import pandas as pd; print(pd.read_csv({view.saved.path!r}).people.sum())"
    run = await sites.service.run(CodeRun(ME, code, box.sandbox_id, timeout_s=HANG_S))
    assert run.stdout.head.strip() == "197744"
    binary, data = await sites.service.fetch(ME, FetchRequest(url=f"{sites.plain}/archive.bin"), box.sandbox_id)
    assert (binary.text, binary.kind) == (None, "binary")
    assert binary.saved is not None
    assert await sites.service.read_all(ME, box.sandbox_id, binary.saved.path) == data == SITE["/archive.bin"].body


async def test_a_binary_file_is_an_artifact_of_its_owner_alone(sites: Sites):
    view, _ = await sites.service.fetch(ME, FetchRequest(url=f"{sites.plain}/archive.bin"), None)
    assert view.artifact is not None
    assert view.artifact.uri is not None
    artifact_id = view.artifact.uri.split("/")[2]
    assert sites.service.web.artifact(ME, artifact_id).data == SITE["/archive.bin"].body
    with pytest.raises(ArtifactNotFound):
        sites.service.web.artifact("bob", artifact_id)


async def test_many_owners_read_pages_at_once_and_each_gets_its_own(sites: Sites):
    found: dict[str, str] = {}

    async def one(owner: str, url: str) -> None:
        found[owner] = (await sites.service.fetch(owner, FetchRequest(url=url), None))[0].text or ""

    with anyio.fail_after(2 * HANG_S):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(one, f"json-{number}", f"{sites.plain}/data.json")
                tasks.start_soon(one, f"pdf-{number}", f"{sites.secure}/pdf")
    assert all(("report" in text) is owner.startswith("pdf") for owner, text in found.items())
    assert len(found) == 8
    owners = {access.caller.owner for access in sites.accesses}
    assert owners == set(found)
