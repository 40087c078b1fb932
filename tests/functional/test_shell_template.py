"""A template whose language is shell: built, frozen and restored without a kernel process."""

from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app import Host
from templates.model import Template
from templates.store import Store
from tests.functional.machines import Machines, only
from tests.waiting import BUILD_S

pytestmark = [pytest.mark.vm, only("gvisor")]

TEMPLATE = Template.model_validate(
    {
        "name": "test-shell",
        "folder": Path("/templates/test-shell"),
        "title": "Shell",
        "description": "Nothing but the base.",
        "language": "shell",
        "source": {"debian": {"suite": "bookworm"}},
        "machine": {"memory_mb": 128, "disk_mb": 64},
        "env": {"GREETING": "good day"},
        "warmup": {"code": "echo warm > warm; cd /; sleep 1000 &"},
    }
)


async def test_code_and_commands_share_a_session_in_clones_of_a_shell_template(host: Host):
    try:
        with anyio.fail_after(BUILD_S):
            built = await host.builder.build(TEMPLATE, host.driver)
        machines = Machines(host, built)
        async with machines.clone() as clone:
            assert clone.agent.hello.language == "shell"
            assert (await clone.run('pwd; cat warm; echo "$GREETING"; cd /tmp')).out == "/workspace\nwarm\ngood day"
            assert (await clone.command("pwd")).out == "/tmp"
            assert "sleep" in (await clone.command("cat /proc/[0-9]*/comm")).out.split()
        await machines.assert_none_left()
    finally:
        store = Store(host.settings.home)
        for entry in store.entries():
            if entry.details.get("template") == TEMPLATE.name:
                await store.remove(entry.kind, entry.key)
