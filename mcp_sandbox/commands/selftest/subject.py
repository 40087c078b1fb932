"""The sandboxes under test, used as every client uses them: through the service."""

import json
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ValidationError

from guest.places import AGENT_PYTHON, WORKSPACE
from mcp_sandbox.app import Host, open_service
from mcp_sandbox.commands.selftest import inside
from mcp_sandbox.commands.selftest.inside.attempts import Attempts
from mcp_sandbox.commands.selftest.results import Outcome, Verdict, broken, failed, held
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.runs.requests import CodeRun, CommandRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunView, SandboxView
from templates.model import Template
from vmm.types import Capabilities

OWNER = "self-test"
INSIDE = f"{WORKSPACE}/.selftest"
SECRET_NAME = "SELFTEST_SECRET"  # noqa: S105 - of a variable
RUN_S = 60.0  # one attack takes milliseconds, but seconds on an emulated CPU

Attack = Callable[..., Attempts]
Way = Literal["code", "command"]  # how attacks get into a sandbox


class Attempted(BaseModel):
    """What an attack printed: how much it tried, and what of it succeeded."""

    tried: int
    succeeded: list[str]


@dataclass(frozen=True, slots=True)
class Box:
    """A sandbox under test."""

    service: SandboxService
    view: SandboxView

    @property
    def id(self) -> str:
        return self.view.sandbox_id

    @property
    def ways(self) -> tuple[Way, ...]:
        """How attacks get in: as code if that is Python, and always as commands."""
        return ("code", "command") if self.view.language == "python" else ("command",)

    async def code(self, source: str, timeout_s: float = RUN_S) -> RunView:
        """Run code in the template's language."""
        return await self.service.run(CodeRun(OWNER, source, self.id, timeout_s=self._allowed(timeout_s)))

    async def command(self, line: str, timeout_s: float = RUN_S, env: Mapping[str, str] | None = None) -> RunView:
        """Run a shell command."""
        request = CommandRun(OWNER, line, self.id, timeout_s=self._allowed(timeout_s), env=env)
        return await self.service.run(request)

    async def python(self, source: str, timeout_s: float = RUN_S) -> RunView:
        """Run Python code in a process of its own, whatever the template's language is."""
        path = f"{WORKSPACE}/selftest-{secrets.token_hex(4)}.py"
        await self.write(path, source.encode())
        return await self.command(f"{AGENT_PYTHON} {path}", timeout_s)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        await self.service.write(OWNER, self.id, path, data)

    async def read(self, path: str) -> bytes:
        """Read a file."""
        return await self.service.read_all(OWNER, self.id, path)

    async def goes_on(self) -> bool:
        """Return whether the sandbox still runs commands."""
        try:
            result = await self.command("echo goes on")
        except SandboxError:
            return False
        return result.stdout.head.strip() == "goes on"

    async def attack(self, way: Way, attack: Attack, *arguments: object) -> Outcome:
        """Make an attack and return the verdict on its attempts."""
        words = (attack.__module__.rpartition(".")[2], attack.__name__, json.dumps(arguments))
        if way == "code":
            start = f"import sys\nif {INSIDE!r} not in sys.path: sys.path.append({INSIDE!r})\n"
            result = await self.code(f"{start}from inside.__main__ import attack\nattack{words}")
        else:
            line = shlex.join((AGENT_PYTHON, "-m", "inside", *words))
            result = await self.command(line, env={"PYTHONPATH": INSIDE})
        return _outcome(result)

    def _allowed(self, timeout_s: float) -> float:
        return min(timeout_s, self.service.settings.runs.max_timeout_s)


def _outcome(attacked: RunView) -> Outcome:
    """Return the verdict on an attack from what it printed. One that tried nothing shows nothing."""
    try:
        attempts = Attempted.model_validate_json(attacked.stdout.head + attacked.stdout.tail)
    except ValidationError:
        error = attacked.error.message if attacked.error else attacked.stderr.head
        return failed(f"The attack ended with {attacked.status} and no report: {error}")
    if attempts.succeeded:
        return broken(f"possible: {', '.join(attempts.succeeded)}")
    return held(f"tried {attempts.tried} ways") if attempts.tried > 0 else failed("Nothing was tried.")


@asynccontextmanager
async def open_subject(host: Host) -> AsyncIterator["Subject"]:
    """Open a service on `host`, with a secret in the environment of this process that no sandbox may see."""
    os.environ[SECRET_NAME] = secret = secrets.token_hex(16)
    try:
        async with open_service(host, pooled=False) as service:
            yield Subject(service, host.driver.capabilities, secret)
    finally:
        del os.environ[SECRET_NAME]


class Subject:
    """A driver and a template on this host, and a sandbox that cases share if they leave it as it was."""

    def __init__(self, service: SandboxService, capabilities: Capabilities, secret: str) -> None:
        self.service = service
        self.capabilities = capabilities
        self.secret = secret  # a value in the environment of this process
        self._shared: Box | None = None

    @property
    def template(self) -> Template:
        """The template of all sandboxes under test."""
        return self.service.settings.catalogue.load(self.service.settings.template)

    async def shared(self) -> Box:
        """Return the shared sandbox, or another one if it is no longer alive."""
        if self._shared is None or not await self._shared.goes_on():
            self._shared = await self._create()
        return self._shared

    @asynccontextmanager
    async def fresh(self, memory_mb: int | None = None) -> AsyncIterator[Box]:
        """Create a sandbox that no other case uses, if wanted with so much memory, as far as the operator allows it."""
        box = await self._create(memory_mb and min(memory_mb, self.service.settings.limits.sandbox_memory_mb))
        try:
            yield box
        finally:
            await self.service.close(OWNER, box.id)

    async def attack(self, attack: Attack, *arguments: object) -> Outcome:
        """Make an attack in the shared sandbox, in every way, and return the first bad verdict if there is one."""
        box = await self.shared()
        for way in box.ways:
            outcome = await box.attack(way, attack, *arguments)
            if outcome.verdict is not Verdict.HELD:
                return Outcome(verdict=outcome.verdict, detail=f"as {way}: {outcome.detail}")
        return outcome

    async def _create(self, memory_mb: int | None = None) -> Box:
        box = Box(self.service, await self.service.create(OWNER, memory_mb=memory_mb))
        for file in files(inside).iterdir():
            if file.name.endswith(".py"):
                await box.write(f"{INSIDE}/inside/{file.name}", file.read_bytes())
        return box
