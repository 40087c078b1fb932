"""When a machine's snapshot is taken."""

from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client.messages import WarmUp
from guest.protocol import PROTOCOL_VERSION, Decoder, encode
from templates.catalogue import Catalogue
from templates.image_config import ImageConfig
from templates.model import ServiceCommand, Warmup
from templates.snapshot import make_snapshot, warm_up_of
from templates.tools import LoggedTools
from tests.unit.fake_driver import FakeDriver, Memory
from vmm.driver import Machine
from vmm.types import GuestCode, MachineSpec, NetworkMode, Snapshot

pytestmark = pytest.mark.anyio


class EndsWhenFrozen(FakeDriver):
    """Its machines end with the snapshot, and would end with their agent's stream too, as gVisor's do."""

    def __init__(self) -> None:
        super().__init__(self._live)
        self.asked: list[str] = []
        self.alive = True
        self._frozen = anyio.Event()
        self._ended = anyio.Event()

    async def _live(self, stream: ByteStream, _memory: Memory) -> None:
        async with stream, anyio.create_task_group() as tasks:
            tasks.start_soon(self._answer, stream, tasks.cancel_scope)
            await self._frozen.wait()
            tasks.cancel_scope.cancel()
        self.alive = False
        self._ended.set()

    async def _answer(self, stream: ByteStream, life: anyio.CancelScope) -> None:
        decoder = Decoder()
        try:
            while True:
                for frame in decoder.feed(await stream.receive()):
                    self.asked.append(str(frame.header["op"]))
                    hello = {"version": PROTOCOL_VERSION, "nonce": frame.header.get("nonce"), "agent": "x"}
                    answer = {"id": frame.header["id"], "ok": True, **hello, "language": "python"}
                    await stream.send(encode({**answer, "language_version": "3"}, b""))
        except anyio.EndOfStream:
            life.cancel()

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        await anyio.wait_all_tasks_blocked()  # an agent whose stream was closed would have noticed by now
        assert self.alive
        self._frozen.set()
        await self._ended.wait()
        return await super().snapshot(machine, dst)


async def test_a_machine_is_frozen_after_its_warm_up_with_its_stream_open(tmp_path: Path):
    driver, template = EndsWhenFrozen(), Catalogue().load("python-data-analysis")
    spec = MachineSpec("build-1", tmp_path, GuestCode(tmp_path), memory_mb=128, vcpus=1, disk_mb=64)
    tools = LoggedTools(tmp_path / "log", lambda line: None)
    with anyio.fail_after(10):
        details = await make_snapshot(tools, tmp_path, template=template, warm_up=WarmUp(), driver=driver, spec=spec)
    assert driver.asked == ["hello", "warm"]
    assert details == {"template": template.name, "driver": "fake"}
    assert (tmp_path / "state").is_file()
    assert driver.running == []


@pytest.mark.parametrize(("network", "proxy"), [("none", None), ("proxy", "http://127.0.0.1:3128"), ("nat", None)])
async def test_a_service_is_told_about_the_proxy_that_its_sandbox_may_have(network: str, proxy: str | None):
    service = ServiceCommand(start_cmd="exec serve", ready_cmd="true", env={"MINE": "1"})
    template = Catalogue().load("python-data-analysis")
    template = template.model_copy(update={"service": service, "network": NetworkMode(network)})
    started = warm_up_of(template, ImageConfig()).service
    assert started is not None
    assert (started.env.get("https_proxy"), started.env["MINE"]) == (proxy, "1")


@pytest.mark.parametrize(("wanted", "rehearsal"), [(None, "print(1)\n1+1"), ("2 + 2", "2 + 2"), ("", "")])
async def test_a_template_rehearses_its_own_code_or_that_of_its_language(wanted: str | None, rehearsal: str):
    template = Catalogue().load("python-data-analysis").model_copy(update={"warmup": Warmup(rehearsal=wanted)})
    assert warm_up_of(template, ImageConfig()).rehearsal == rehearsal
