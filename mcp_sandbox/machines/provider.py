"""Where machines come from: whoever runs code asks a provider for a lease."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from guest.client import AgentClient
from mcp_sandbox.errors import UnknownTemplate, UnusableTemplate
from templates.catalogue import Catalogue
from templates.errors import InvalidTemplate
from templates.errors import UnknownTemplate as NoSuchTemplate
from templates.model import Template
from vmm.driver import Machine
from vmm.types import Accel, Isolation

LEVELS = {
    Isolation.VM: "every sandbox is a virtual machine with a kernel of its own",
    Isolation.KERNEL: "every sandbox has an application kernel between its code and the host's kernel",
    Isolation.NAMESPACE: "sandboxes share the host's kernel, the weakest level",
}
TITLES = {"qemu": "QEMU", "gvisor": "gVisor"}  # drivers whose makers write them in another way
CPUS = {Accel.KVM: "KVM", Accel.TCG: "emulated CPU: many times slower", None: "native CPU"}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What stands between a sandbox's code and this host."""

    driver: str
    isolation: Isolation
    accel: Accel | None
    limits: tuple[str, ...] = ()  # protections that are not in force, in words for people

    def __str__(self) -> str:
        title = TITLES.get(self.driver, self.driver)
        missing = f"; not in force: {'; '.join(self.limits)}" if self.limits else ""
        return f"{self.isolation} ({title}, {CPUS[self.accel]}): {LEVELS[self.isolation]}{missing}"


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """How long it took to get a machine."""

    queue_s: float
    restore_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    """A machine in somebody's hands: restored, unique, greeted. It ends with the context that gave it."""

    machine: Machine
    agent: AgentClient
    template: Template
    facts: HostFacts
    timings: LeaseTimings
    version: str = ""  # of what is built of the template: see Supply


@dataclass(frozen=True, slots=True)
class Frozen:
    """The whole state of a machine at one moment, kept aside. It ends with the context that gave it."""

    template: Template


def find_template(catalogue: Catalogue, name: str) -> Template:
    """The definition of a template, for somebody who wants a machine of it.

    Raises:
        UnknownTemplate, UnusableTemplate: there is none.
    """
    try:
        return catalogue.load(name)
    except NoSuchTemplate:
        raise UnknownTemplate(name, catalogue.names()) from None
    except InvalidTemplate as error:
        raise UnusableTemplate(name, str(error)) from None


class Supply(Protocol):
    """What machines can be had of at the moment. Builds change it while a server runs."""

    def templates(self) -> Mapping[str, Template]:
        """All templates, built or not."""
        ...

    async def version(self, template: str) -> str:
        """Which making of a template the next machine would be of. Asked often, so it is quick while nothing changes.

        Raises:
            SandboxError: there would be no machine.
        """
        ...


class Provider(Protocol):
    """A source of machines. A pool or a cluster is another provider."""

    def acquire(self, template: str) -> AbstractAsyncContextManager[Lease]:
        """A machine of `template` that nobody else has or had."""
        ...

    def freeze(self, lease: Lease) -> AbstractAsyncContextManager[Frozen]:
        """The state of a machine as it is now; the machine goes on. Nothing may be asked of its agent meanwhile.

        The context may be left in any task and in any order: machines come and go while it lasts.
        """
        ...

    def thaw(self, frozen: Frozen, *, copy: bool) -> AbstractAsyncContextManager[Lease]:
        """A machine that goes on from a frozen state: as the same one, or as a copy that is unique again."""
        ...
