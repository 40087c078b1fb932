"""Settings of sandboxes: how many there may be, how long they live, and how much runs and files may take."""

from typing import Self

from pydantic import Field, model_validator

from guest.protocol import MAX_COMMANDS
from mcp_sandbox.config.base import Group


class LimitSettings(Group):
    """How much may be in use at once."""

    sandboxes: int = Field(8, ge=1, le=1000, description="Live sandboxes, one-off runs included.")
    memory_mb: int | None = Field(None, ge=128, description="Memory that live sandboxes may take, with overhead.")
    owner_sandboxes: int | None = Field(None, ge=1, description="Live sandboxes of one owner.")
    owner_memory_mb: int | None = Field(None, ge=128, description="Memory that one owner's live sandboxes may take.")
    sandbox_memory_mb: int = Field(4096, ge=128, le=65_536, description="Most memory a client may give a sandbox.")
    sandbox_cpus: int | None = Field(None, ge=1, le=64, description="Most CPUs it may give one; default: the host's.")
    owner_runs: int | None = Field(None, ge=1, description="Active runs of one owner.")
    paused: int = Field(8, ge=0, le=1000, description="Paused sandboxes; their state is on disk.")
    owner_paused: int | None = Field(None, ge=0, description="Paused sandboxes of one owner.")
    restores: int = Field(4, ge=1, le=64, description="Machines being restored at the same time.")
    queue_timeout_s: float = Field(20, ge=0, description="Seconds a new sandbox waits for room within the limits.")


class PoolSettings(Group):
    """Machines kept ready before a client asks for them."""

    min: int = Field(1, ge=0, le=64, description="Machines kept ready per template.")
    max: int = Field(4, ge=0, le=64, description="Machines kept ready per template after a burst; 0 turns it off.")
    memory_mb: int = Field(5120, ge=0, description="Memory that pooled machines may take, with overhead.")
    max_age_s: float = Field(3600, gt=0, description="Age at which a pooled machine is replaced.")
    idle_s: float = Field(600, gt=0, description="Seconds after which a burst no longer counts.")


class LifetimeSettings(Group):
    """How long a sandbox lives."""

    idle_s: float = Field(900, gt=0, description="Seconds without use after which a sandbox ends.")
    max_idle_s: float = Field(3600, gt=0, description="Longest idle time a client may ask for.")
    max_age_s: float = Field(14_400, gt=0, description="Age at which every sandbox ends.")
    standstill_s: float = Field(
        5, ge=0, description="Seconds without use after which an idle machine uses no CPU; 0 turns it off."
    )

    @model_validator(mode="after")
    def _default_within_maximum(self) -> Self:
        if self.idle_s > self.max_idle_s:
            raise ValueError("idle_s is greater than max_idle_s")
        return self


class RunSettings(Group):
    """How long runs take and how many results are kept."""

    timeout_s: float = Field(30, gt=0, description="Time limit of a run unless the client sets one.")
    max_timeout_s: float = Field(600, gt=0, description="Longest time limit a client may set.")
    # Many clients give up on a call after 60 s and lose its result.
    foreground_s: float = Field(45, gt=0, description="Seconds after which a call leaves its run in the background.")
    max_code_bytes: int = Field(1 << 20, ge=1024, le=1 << 20, description="Longest code run_code takes.")
    concurrent: int = Field(8, ge=1, le=MAX_COMMANDS, description="Active runs of one sandbox.")
    kept: int = Field(16, ge=1, le=1000, description="Background results kept per sandbox.")
    kept_bytes: int = Field(8 << 20, ge=1024, description="Size of all kept results of a sandbox.")

    @model_validator(mode="after")
    def _default_within_maximum(self) -> Self:
        if self.timeout_s > self.max_timeout_s:
            raise ValueError("timeout_s is greater than max_timeout_s")
        return self


class OutputSettings(Group):
    """How much of a run's output a result shows.

    A result should stay near 10,000 tokens. Head and tail of both streams are 32 KiB, about 8,000 tokens.
    """

    head_bytes: int = Field(8192, ge=256, le=1 << 20, description="Start of an output stream shown in a result.")
    tail_bytes: int = Field(8192, ge=256, le=1 << 20, description="End of an output stream shown in a result.")
    page_bytes: int = Field(32_768, ge=1024, le=1 << 20, description="Most text one read returns.")
    # The guest sends this much of a stream as it comes, then only the end. The rest goes to a file in the sandbox.
    live_bytes: int = Field(512 << 10, ge=1024, le=16 << 20, description="Start of a stream sent while code runs.")
    images: int = Field(4, ge=0, le=32, description="Images shown in one result.")
    image_bytes: int = Field(2 << 20, ge=0, description="Size of all images shown in one result.")


class FileSettings(Group):
    """Files that clients read and write."""

    max_write_bytes: int = Field(16 << 20, ge=1024, description="Largest file write_file takes.")
    max_read_bytes: int = Field(16 << 20, ge=1024, description="Largest file returned as an image or a resource.")
    max_copy_bytes: int = Field(
        4 << 30, ge=1024, description="Largest file or archive that upload_file and download_file copy."
    )
    max_entries: int = Field(500, ge=1, le=10_000, description="Most entries in one listing.")
