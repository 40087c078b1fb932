"""The driver and template under test, and the number of samples."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from guest.client import AgentClient
from guest.client.messages import Display, Finished, RunCode
from mcp_sandbox.app import Host
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.provider import HostFacts
from mcp_sandbox.machines.unique import new_identity
from templates.build import Builder, BuiltTemplate
from vmm.driver import Driver, Machine

MB = 1_000_000
FIRST_CODE = "1+1"


@dataclass(eq=False)
class MeasurementFailed(SandboxError):
    """A benchmark could not measure what it set out to."""

    code = "measurement_failed"
    sentence = "{reason}"
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of samples per measurement."""

    restores: int
    clones: int
    cold_boots: int
    timed_boots: int  # of these, started one at a time as restores are
    calls: int
    transfers: int
    cpu_rounds: int
    compiles: int
    pool_hits: int
    bursts: int
    forks: int
    crowd_s: float  # how long many clients work at once
    cycles: int | None = None  # of a soak; None: the driver's default


FULL = Plan(
    restores=30,
    clones=10,
    cold_boots=10,
    timed_boots=3,
    calls=200,
    transfers=10,
    cpu_rounds=30,
    compiles=10,
    pool_hits=100,
    bursts=3,
    forks=10,
    crowd_s=300.0,
)
QUICK = Plan(
    restores=10,
    clones=10,
    cold_boots=1,
    timed_boots=1,
    calls=50,
    transfers=3,
    cpu_rounds=10,
    compiles=3,
    pool_hits=20,
    bursts=1,
    forks=3,
    crowd_s=10.0,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A usable driver, a template built for it, and where to show progress."""

    host: Host
    facts: HostFacts
    built: BuiltTemplate
    plan: Plan
    progress: Callable[[str], None]  # replaces the line in the live display

    @property
    def settings(self) -> Settings:
        return self.host.settings

    @property
    def driver(self) -> Driver:
        return self.host.driver

    @property
    def builder(self) -> Builder:
        return self.host.builder

    def start(self, name: str) -> AbstractAsyncContextManager[tuple[Machine, AgentClient]]:
        """Start a machine the way a sandbox gets it: warm and unique."""
        return start(self.driver, self.built, new_identity(name))


async def run_code(agent: AgentClient, code: str = FIRST_CODE) -> str:
    """Run code and return the value of its last expression as text.

    Raises:
        MeasurementFailed: the code failed.
    """
    shown = ""
    async with agent.run(RunCode(code=code)) as run:
        async for event in run:
            if isinstance(event, Display):
                shown = event.data.get("text/plain", "")
            if isinstance(event, Finished) and event.status != "ok":
                raise MeasurementFailed(f"A run ended with {event.status}.")
    return shown
