"""Sandboxes with network mode `proxy`: real pip, git, curl and npm reach what the operator allows, and nothing else."""

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.app import Host
from mcp_sandbox.config import Settings
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.pool import Pool, pool_limits
from mcp_sandbox.runs.requests import CodeRun, CommandRun
from mcp_sandbox.sandboxes.networks import Networks
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunView, SandboxView
from templates.build import BuiltTemplate
from tests.functional.machines import only
from tests.web.sites import GONE, Page, folder, pages
from tests.web.world import NETWORKS, World, forget_proxies
from vmm.types import NetworkMode

if TYPE_CHECKING:
    from mcp_sandbox.machines.provider import Provider

pytestmark = [pytest.mark.vm, only("gvisor", "bubblewrap")]

ME = "ada"
LIMIT_S = 600  # pip takes minutes on a very busy host
AUTHORITY = "/workspace/authority.pem"
WHEEL = "greeting-1.0-py3-none-any.whl"
PACKAGE = '{"name": "greeting", "version": "1.0.0"}'


def make_wheel(path: Path) -> bytes:
    """Return a wheel with one module."""
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(path / WHEEL, "w") as wheel:
        wheel.writestr("greeting.py", "TEXT = 'hello from a wheel'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"greeting.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return (path / WHEEL).read_bytes()


def make_repository(path: Path) -> Path:
    """Return a directory that serves a repository over plain http: git's files, with an index of them."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(path)]
    (path / "read me").write_text("cloned\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"], ["update-server-info"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return path / ".git"


def make_package(registry: str) -> dict[str, Page]:
    """Return the pages of a registry that has one package."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in {"package.json": PACKAGE, "index.js": "module.exports = 'hello from a package'\n"}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode()))
    data = packed.getvalue()
    integrity = f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"
    version = {**json.loads(PACKAGE), "dist": {"tarball": f"{registry}/greeting.tgz", "integrity": integrity}}
    about = {"name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    answer = Page(json.dumps(about).encode(), headers={"Content-Type": "application/json"})
    return {"/greeting": answer, "/greeting.tgz": Page(data)}


class Web(World):
    """The world of these tests: an index of packages, a repository, a plain page and one that nobody allows."""

    index: str
    repository: str
    plain: str
    forbidden: str


@pytest.fixture
async def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Web]:
    forget_proxies(monkeypatch)
    (tmp_path / "repository").mkdir()
    link = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
    html = {"Content-Type": "text/html"}
    index = {"/simple/greeting/": Page(link, headers=html), f"/{WHEEL}": Page(make_wheel(tmp_path))}
    web = Web()
    async with AsyncExitStack() as stack:
        open_site = stack.enter_async_context
        web.index = await open_site(web.site("index.test", pages(index), secure=True))
        index.update(make_package(web.index))
        repository = folder(make_repository(tmp_path / "repository"))
        web.repository = await open_site(web.site("code.test", pages(repository)))
        web.plain = await open_site(web.site("plain.test", pages({"/": Page(b"plain page\n")})))
        web.forbidden = await open_site(web.site("forbidden.test", pages({"/": Page(b"secret\n")})))
        yield web


@asynccontextmanager
async def serving(host: Host, web: Web, *more: str, pooled: bool = False) -> AsyncIterator[SandboxService]:
    """A service whose operator allows three of the sites, and more."""
    network = {
        "allow_domains": ["index.test", "code.test", "plain.test", *more],
        "ports": sorted({443, *web.ports}),
        "private_networks": NETWORKS,
    }
    settings = Settings.model_validate({"home": host.settings.home, "network": network})
    builds = Builds(host.driver, host.builder, settings.catalogue)
    provider: Provider = LocalProvider(host.driver, builds, max_restores=2, run_dir=settings.run_dir)
    if pooled:
        provider = Pool(provider, builds, pool_limits(settings.pool, max_restores=2))
    networks = Networks(settings, web.accesses.append, web.resolve)
    async with provider, SandboxService(provider, settings, networks=networks) as service:
        yield service


@pytest.fixture
async def service(host: Host, built: BuiltTemplate, web: Web) -> AsyncIterator[SandboxService]:
    async with serving(host, web) as service:
        yield service


@pytest.fixture
async def box(service: SandboxService, web: Web) -> SandboxView:
    view = await service.create(ME, network=NetworkMode.PROXY)
    await service.write(ME, view.sandbox_id, AUTHORITY, web.authority_pem)
    return view


async def command(service: SandboxService, box: SandboxView, line: str) -> RunView:
    return await service.run(CommandRun(ME, line, box.sandbox_id, timeout_s=LIMIT_S))


async def code(service: SandboxService, box: SandboxView, text: str) -> RunView:
    return await service.run(CodeRun(ME, text, box.sandbox_id, timeout_s=LIMIT_S))


def output_of(run: RunView) -> str:
    assert (run.status, run.exit_code) in (("ok", None), ("ok", 0), ("exited", 0)), (
        f"{run.stdout}{run.stderr}{run.error}"
    )
    return run.stdout.head


async def test_pip_installs_a_wheel_from_an_index_and_the_live_kernel_imports_it(service, box, web):
    assert (box.network, box.allow_domains) == ("proxy", ["index.test", "code.test", "plain.test"])
    pip = f"pip install --cert {AUTHORITY} --index-url {web.index}/simple greeting"
    output_of(await command(service, box, pip))
    assert output_of(await code(service, box, "import greeting; print(greeting.TEXT)")) == "hello from a wheel\n"
    assert output_of(await command(service, box, "python3 -c 'import greeting; print(greeting.TEXT)'")) == (
        "hello from a wheel\n"
    )
    assert {access.target.partition(":")[0] for access in web.accesses} == {"index.test"}


async def test_git_clones_a_repository(service, box, web):
    assert (
        output_of(await command(service, box, f"git clone -q {web.repository} copy && cat 'copy/read me'"))
        == "cloned\n"
    )


async def test_npm_installs_a_package_from_a_registry(host, service, web):
    if host.driver.name != "gvisor":
        pytest.skip("the template is built for gvisor only")
    box = await service.create(ME, "javascript", network=NetworkMode.PROXY)
    await service.write(ME, box.sandbox_id, AUTHORITY, web.authority_pem)
    install = f"npm install --cafile {AUTHORITY} --registry {web.index} --no-audit greeting"
    output_of(await command(service, box, install))
    assert output_of(await command(service, box, "node -p \"require('greeting')\"")) == "hello from a package\n"


async def test_curl_and_python_reach_an_allowed_site(service, box, web):
    assert output_of(await command(service, box, f"curl -sS {web.plain}/")) == "plain page\n"
    fetch = f"from urllib.request import urlopen\nprint(urlopen('{web.plain}/').read().decode(), end='')"
    assert output_of(await code(service, box, fetch)) == "plain page\n"


async def test_a_refused_domain_is_named_with_what_to_do(service, box, web):
    run = await command(service, box, f"curl -sS -w '%{{http_code}}' {web.forbidden}/")
    host = web.forbidden.removeprefix("http://")
    assert run.stdout.head.endswith("403")
    assert "forbidden.test is not among the allowed domains" in run.stdout.head
    assert "network.allow_domains" in run.stdout.head
    (refusal,) = run.network_refusals
    assert refusal.startswith(f"{host} (domain-not-allowed): ")
    assert refusal.endswith("network.allow_domains decides")
    assert (await command(service, box, "true")).network_refusals == ()


async def test_pip_says_why_its_index_is_refused(service, box):
    run = await command(service, box, "pip install --index-url https://pypi.test/simple greeting")
    assert run.exit_code not in (0, None)
    assert "403 refused by mcp-sandbox: domain-not-allowed" in run.stderr.head + run.stdout.head
    assert "offline" not in run.stderr.head


async def test_a_sandbox_that_asks_for_one_domain_reaches_no_other(service, web):
    box = await service.create(ME, network=NetworkMode.PROXY, allow_domains=["plain.test"])
    assert box.allow_domains == ["plain.test"]
    assert output_of(await command(service, box, f"curl -sS {web.plain}/")) == "plain page\n"
    run = await command(service, box, f"curl -sS {web.repository}/HEAD")
    assert "domain-not-requested" in run.stdout.head
    assert "allow_domains" in run.stdout.head


async def test_a_sandbox_without_a_network_and_a_one_off_run_have_no_proxy(service, web):
    box = await service.create(ME)
    assert (box.network, box.allow_domains) == ("none", [])
    for sandbox_id in (box.sandbox_id, None):
        run = await service.run(CommandRun(ME, f"env | grep -i proxy; curl -sS {web.plain}/", sandbox_id))
        assert run.stdout.head == ""
        assert "Could not resolve host" in run.stderr.head
    offline = await command(service, box, "pip install greeting")
    assert "this sandbox is offline" in offline.stderr.head
    assert web.accesses == []


async def test_a_pooled_machine_is_leased_with_a_network(host, built, web):
    async with serving(host, web, pooled=True) as service:
        await service.run(CodeRun(ME, "1"))
        offline = await service.create(ME)
        online = await service.create(ME, network=NetworkMode.PROXY)
        fetch = f"import os, urllib.request as u\nprint(u.urlopen('{web.plain}/').read().decode(), end='')"
        assert output_of(await code(service, online, fetch)) == "plain page\n"
        assert output_of(await command(service, online, f"curl -sS {web.plain}/")) == "plain page\n"
        assert (await code(service, offline, fetch)).error is not None


async def test_a_kernel_that_replaces_a_killed_one_has_the_network_too(service, box, web):
    await code(service, box, "import os; os.kill(os.getpid(), 9)")
    fetch = f"import urllib.request as u\nprint(u.urlopen('{web.plain}/').read().decode(), end='')"
    assert output_of(await code(service, box, fetch)) == "plain page\n"


async def test_a_fork_and_a_pause_end_connections_and_both_sides_go_on_in_their_mode(host, built, web):
    if not host.driver.capabilities.snapshot:
        pytest.skip(f"{host.driver.name} cannot fork")
    connected = anyio.Event()

    async def hold(stream: ByteStream) -> None:
        async with stream:
            connected.set()
            with suppress(*GONE):
                while True:
                    await stream.receive()

    async with web.site("slow.test", hold) as slow, serving(host, web, "slow.test") as service:
        box = await service.create(ME, network=NetworkMode.PROXY)
        waiting = f"curl -sS {slow}/ > /tmp/ended 2>&1 &"
        await service.run(CommandRun(ME, waiting, box.sandbox_id, keep_processes=True))
        await connected.wait()
        (copy,) = await service.fork(ME, box.sandbox_id, 1)
        assert (copy.network, copy.closed_connections) == ("proxy", 1)
        for view in (box, copy):
            assert output_of(await command(service, view, f"curl -sS {web.plain}/")) == "plain page\n"
            ended = "until grep -q curl: /tmp/ended; do sleep 0.1; done; cat /tmp/ended"
            assert "curl: (5" in output_of(await command(service, view, ended))  # no answer, or a reset
        paused = await service.pause(ME, copy.sandbox_id)
        assert (paused.network, paused.closed_connections) == ("proxy", 0)
        await service.resume(ME, copy.sandbox_id)
        assert output_of(await command(service, copy, f"curl -sS {web.plain}/")) == "plain page\n"
        assert web.accesses[-1].caller.sandbox == copy.sandbox_id
