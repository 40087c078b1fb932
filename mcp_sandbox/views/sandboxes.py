"""A sandbox as its owner sees it."""

from typing import Literal

from pydantic import Field

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.views.base import View

Reseed = Literal["global", "all"]  # the random generators of a copy that get a new state: modules' own, or all found


class SandboxView(View):
    """A sandbox: what it is made from, how it is isolated, and how long it lives."""

    sandbox_id: str = Field(description="What later calls name it by.")
    template: str
    language: str
    contents: str = Field("", description="Main libraries and programs of the template.")
    isolation_in_force: str = Field(description="What separates the code from the host, and what is missing.")
    isolation: str = Field(description="vm: its own kernel; kernel: an application kernel; namespace: weakest.")
    driver: str
    accel: str | None = Field(description="kvm, or tcg: emulated and many times slower CPU; null: native.")
    host: str
    memory_mb: int
    vcpus: int
    disk_mb: int
    network: str = Field(description="none: offline; proxy: http and https through a proxy; nat: a network device.")
    allow_domains: list[str] = Field(description="Domains it may reach; *: every public one. Empty unless proxy.")
    closed_connections: int = Field(0, description="Network connections that its last fork or pause closed.")
    working_directory: str = WORKSPACE
    artifacts_directory: str = OUTPUTS
    state: str = Field(description="ready, running or paused")
    run_ids: list[str] = Field(description="The active runs, oldest first.")
    age_s: float
    expires_in_s: float = Field(description="Seconds until it ends unless it is used.")
    ends_in_s: float = Field(description="Seconds until it ends in any case.")
    queue_ms: float = Field(description="How long it waited for room within the limits.")
    restore_ms: float = Field(description="How long its machine took to start; 0 if one was ready.")
    cold_start: bool = Field(False, description="It was booted: the first of its size has no snapshot.")
    missing_protections: list[str] = Field(description="Protections that are missing on this host.")


class ServedSandbox(View):
    """A sandbox of any owner as operators see it: on which server it is, or what a killed server left."""

    sandbox_id: str = Field(description="The machine's id if the machine belongs to no sandbox.")
    owner: str | None
    template: str
    network: str | None = Field(None, description="none, proxy or nat; null: its server does not answer.")
    state: str = Field(description="As its owner sees it; no answer: its server hangs; left over: its server is gone.")
    age_s: float
    expires_in_s: float | None = Field(None, description="Seconds until it ends unless it is used.")
    machine_id: str | None
    server_pid: int


class SandboxList(View):
    """The live sandboxes of an owner."""

    sandboxes: list[SandboxView]
    max_sandboxes: int
    next_offset: int | None = Field(None, description="Give this as offset to go on; null: this is the end.")


class ForkedSandboxes(View):
    """The copies that a fork made."""

    copies: list[SandboxView]


class ClosedSandbox(View):
    """The outcome of closing a sandbox."""

    sandbox_id: str
    closed: bool = Field(description="false: it had already ended")
