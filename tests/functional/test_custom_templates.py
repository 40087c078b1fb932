"""A custom template: changed and pruned while a server uses it, and rebuilt whenever it changes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from mcp_sandbox.app import Host, open_host, open_service
from mcp_sandbox.config import Settings, load_settings
from mcp_sandbox.errors import TemplateNotBuilt, UnusableTemplate
from mcp_sandbox.machines.provider import HostFacts
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from templates.catalogue import BUILT_IN
from templates.locks import is_held
from templates.store import Entry
from tests.footprint import assert_gone
from tests.functional.machines import Machines
from tests.session import current
from tests.waiting import BUILD_S, LOOK_AGAIN_S

pytestmark = pytest.mark.vm

ME = "me"
NAME = "mine"
MARK = "import sys; print(sys.mark)"


class Template:
    """A template with the image of a built-in one, so that building it only takes a snapshot."""

    def __init__(self, path: Path) -> None:
        self.file = path / NAME / "template.toml"
        self.file.parent.mkdir(parents=True)

    def write(self, mark: str) -> None:
        shipped = (BUILT_IN / "python-data-analysis" / "template.toml").read_text()
        text = re.sub(r'code = """.*?"""', f'code = "import sys; sys.mark = {mark!r}"', shipped, flags=re.DOTALL)
        assert mark in text
        self.file.write_text(text)


class Server:
    """A service over real machines, and builds by another process."""

    def __init__(self, host: Host, service: SandboxService) -> None:
        self.host = host
        self.service = service

    async def create(self) -> str:
        return (await self.service.create(ME, NAME)).sandbox_id

    async def mark(self, box: str) -> str:
        result = await self.service.run(CodeRun(ME, MARK, box))
        assert result.status == "ok", result.error
        return result.stdout.head.strip()

    def snapshots(self) -> list[Entry]:
        template = self.host.settings.catalogue.load(NAME)
        return [entry for entry in self.host.builder.entries_of(template) if entry.kind == "snapshot"]

    async def released(self, entry: Entry) -> None:
        """Wait for the machines that use an entry to end; there is no event for it."""
        while is_held(entry.path):
            await anyio.sleep(LOOK_AGAIN_S)


def command(settings: Settings, *words: str) -> list[str]:
    path = [f"--template-path={path}" for path in settings.template_path]
    options = [f"--home={settings.home}", f"--driver={settings.driver}", *path]
    return [sys.executable, "-m", "mcp_sandbox", *options, "template", *words]


async def run(settings: Settings, *words: str) -> str:
    """Run a template command in another process and return its output."""
    done = await anyio.run_process(command(settings, *words), stderr=subprocess.STDOUT)
    return done.stdout.decode()


@pytest.fixture
async def settings(tmp_path: Path, in_force: HostFacts) -> Settings:
    """A home with only what the template is made from: prune would remove other entries."""
    home = current().new_home(tmp_path.name, ("image", "agent", "program"))
    return load_settings(driver="gvisor", home=home, template_path=(tmp_path / "templates",))


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return Template(tmp_path / "templates")


@pytest.fixture
async def server(settings: Settings, template: Template) -> AsyncIterator[Server]:
    """A running server, and the first version of the template built by another process."""
    template.write("one")
    with anyio.fail_after(BUILD_S):
        async with open_host(settings, fetch=True) as host:
            if host.facts is None:
                pytest.skip(f"gvisor: {host.choice.verdict.reason}")
            async with open_service(host, pooled=True) as service:
                server = Server(host, service)
                with pytest.raises(TemplateNotBuilt):
                    await server.create()
                await run(settings, "build", NAME)
                yield server


async def test_new_sandboxes_use_a_new_build_at_once_and_old_ones_keep_theirs(server: Server, template: Template):
    service, settings = server.service, server.host.settings
    old = await server.create()
    (first,) = server.snapshots()
    await service.pause(ME, old)
    template.write("two")
    assert f"Template {NAME} is ready" in await run(settings, "build", NAME)
    new = await server.create()
    assert await server.mark(new) == "two"

    await service.resume(ME, old)
    (copy,) = await service.fork(ME, old, 1)
    assert "in use" in await run(settings, "prune")
    assert [await server.mark(box) for box in (old, copy.sandbox_id, new)] == ["one", "one", "two"]
    assert first in server.snapshots()

    for box in (old, copy.sandbox_id):
        await service.close(ME, box)
    await server.released(first)  # the pool has replaced its machines
    assert "removed" in await run(settings, "prune")
    assert first not in server.snapshots()
    assert await server.mark(new) == "two"


async def test_an_error_in_a_template_affects_only_requests_for_that_template(server: Server, template: Template):
    box = await server.create()
    template.file.write_text("title =")
    with pytest.raises(UnusableTemplate, match=r"template\.toml:1: this is not valid TOML"):
        await server.create()
    assert await server.mark(box) == "one"
    assert server.service.sandboxes(ME)[0].sandbox_id == box
    template.write("one")
    assert await server.mark(await server.create()) == "one"


async def test_the_entries_a_machine_uses_cannot_be_removed_while_it_runs(machines: Machines):
    entries = [machines.host.store.entry(path) for path in machines.built.entries()]
    async with machines.leased() as lease:
        assert {await machines.host.store.remove(entry.kind, entry.key) for entry in entries} == {"in use"}
        assert lease.agent.failure is None
    assert not any(is_held(entry.path) for entry in entries)


# -- watching ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def watching(settings: Settings) -> AsyncIterator[tuple[Process, TextReceiveStream]]:
    async with await anyio.open_process(command(settings, "build", NAME, "--watch"), stdout=None) as process:
        assert process.stderr is not None
        try:
            yield process, TextReceiveStream(process.stderr)
        finally:
            if process.returncode is None:
                process.kill()


async def output_until(output: TextReceiveStream, text: str) -> str:
    """Wait for a text in a process's output; return the output so far."""
    seen = ""
    while text not in seen:
        seen += await output.receive()
    return seen


async def test_a_watched_template_is_rebuilt_after_each_change_until_interrupted(
    settings: Settings, template: Template
):
    template.write("one")
    with anyio.fail_after(BUILD_S):
        async with watching(settings) as (process, output):
            assert "snapshot (" in await output_until(output, f"Template {NAME} is ready")
            template.file.write_text('title = "T"\nlanguage = 1\n')
            errors = await output_until(output, f"Template {NAME} was not built")
            assert f"{template.file}:2: language: Input should be '" in errors
            template.write("two")
            assert "snapshot (" in await output_until(output, f"Template {NAME} is ready")
            children = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGINT)
            assert await process.wait() == 130
        await assert_gone(children, [], settings.run_dir)
    assert list((settings.home / "staging").iterdir()) == []
