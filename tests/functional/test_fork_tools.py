"""Forks, pauses and resumes as a client asks for them, from a real server."""

import anyio
import pytest
from mcp.client import Client

from mcp_sandbox.app import Host
from templates.build import BuiltTemplate
from tests.footprint import files_in
from tests.functional.mcp_client import call, data_of, error_of, server_parameters, text_of
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

MADE = "import numpy, pandas; made = numpy.random.default_rng(3)"
DRAW = "print(made.random())"


async def test_a_client_forks_a_sandbox_and_continues_after_a_pause(host: Host, built: BuiltTemplate):
    if not host.driver.capabilities.snapshot:
        pytest.skip(f"{host.driver.name} takes no snapshots")
    with anyio.fail_after(HANG_S):
        async with Client(server_parameters(driver=host.driver.name, toolsets="advanced")) as client:

            async def shown(sandbox_id: str, code: str) -> str:
                return text_of(await call(client, "run_code", code=code, sandbox_id=sandbox_id))

            box = (await data_of(client, "create_sandbox"))["sandbox_id"]
            await shown(box, f"{MADE}; table = pandas.DataFrame({{'n': range(10)}})")
            forked = await data_of(client, "fork_sandbox", sandbox_id=box, count=2)
            copies = [view["sandbox_id"] for view in forked["copies"]]
            for number, copy in enumerate(copies, start=2):
                assert f"stdout:\n{45 * number}\n" in await shown(copy, f"table.n *= {number}; print(table.n.sum())")
            reseeded = (await data_of(client, "fork_sandbox", sandbox_id=box, reseed="all"))["copies"][0]["sandbox_id"]
            numbers = [(await shown(copy, DRAW)).splitlines()[1] for copy in (*copies, reseeded)]
            assert numbers[0] == numbers[1] != numbers[2]
            await call(client, "close_sandbox", sandbox_id=reseeded)
            assert (await data_of(client, "pause_sandbox", sandbox_id=box))["state"] == "paused"
            refused = error_of(await client.call_tool("run_code", {"code": "1", "sandbox_id": box}))
            assert f'resume_sandbox(sandbox_id="{box}")' in refused
            assert (await data_of(client, "resume_sandbox", sandbox_id=box))["state"] == "ready"
            assert "stdout:\n45\n" in await shown(box, "print(table.n.sum())")
            alive = {view["sandbox_id"] for view in (await data_of(client, "list_sandboxes"))["sandboxes"]}
            assert alive == {box, *copies}
    assert files_in(host.settings.run_dir) == []
