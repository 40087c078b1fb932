"""The contents of a template.toml, validated when it is read."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from guest.languages import LanguageName, language
from vmm.types import OVERHEAD_MB, NetworkMode

PoolMode = Literal["pooled", "cold"]
SourceKind = Literal["debian", "oci", "dockerfile"]
VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
Variable = Annotated[str, StringConstraints(pattern=VARIABLE)]

# All of these end up on command lines, so none may look like an option or, except for files, like a path.
ImageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9\[][^\s\x00]*$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[\w-][^/\x00]*(/[\w-][^/\x00]*)*$")]  # without ".." in it
DebianPackage = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]+(/(bookworm|trixie))?$")]
Command = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]+$")]
Wheel = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.!+_-]+$")
]


class _Strict(BaseModel):
    """A table of template.toml: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DebianSource(_Strict):
    """Packages of a Debian suite, with Python wheels on top."""

    suite: Literal["bookworm", "trixie"]
    packages: list[DebianPackage] = Field(default=[], description="one of another suite is written golang-go/trixie")
    run: list[Command] = Field(default=[], description="shell commands, run as root in the image after its packages")
    wheels: list[Wheel] = Field(default=[], description="exact versions, so that a rebuild gives the same image")
    dependencies: list[Wheel] | None = Field(
        default=None, description="all wheels that `wheels` depend on; then pip resolves nothing, which is faster"
    )
    finish: list[Command] = Field(default=[], description="shell commands, run as root in the image after its wheels")


class Source(_Strict):
    """Where a template's files come from: exactly one of these."""

    debian: DebianSource | None = None
    oci: ImageName | None = Field(
        default=None, description="name:tag, name@sha256:…, oci:DIR, oci-archive:FILE or docker-archive:FILE"
    )
    dockerfile: FileName | None = Field(default=None, description="a Dockerfile in the template's directory")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def kind(self) -> SourceKind:
        """Which source is given."""
        if self.debian is not None:
            return "debian"
        return "oci" if self.oci is not None else "dockerfile"


class MachineSize(_Strict):
    """The resources of each machine."""

    memory_mb: int = Field(ge=128, le=65536)
    vcpus: int = Field(default=1, ge=1, le=64)
    disk_mb: int = Field(ge=64, le=1_048_576, description="space for files that the machine writes")
    disk_mb_per_s: int | None = Field(
        default=None, ge=1, le=100_000, description="how much may be read from and written to a disk in a second"
    )
    disk_iops: int | None = Field(default=None, ge=10, le=10_000_000, description="requests to a disk in a second")

    @property
    def limits_disks(self) -> bool:
        """Whether machines may not use their disks as fast as they can."""
        return (self.disk_mb_per_s, self.disk_iops) != (None, None)

    @property
    def host_mb(self) -> int:
        """How much of the host's memory a machine may take, which limits on memory count."""
        return self.memory_mb + OVERHEAD_MB


class Warmup(_Strict):
    """Code that runs once, before the snapshot is taken."""

    code: str = ""
    rehearsal: str | None = Field(
        default=None,
        max_length=16_000,
        description="code that machines run before they wait in the pool; default: the language's",
    )


class ServiceCommand(_Strict):
    """A process that starts before the snapshot is taken and runs in every sandbox."""

    start_cmd: str | None = Field(
        default=None, min_length=1, description="shell command; default: the image's ENTRYPOINT"
    )
    ready_cmd: str = Field(min_length=1, description="shell command that succeeds once the process serves")
    env: dict[Variable, str] = {}
    cwd: str | None = Field(default=None, description="default: the image's WORKDIR, or /workspace")
    ready_timeout_s: float = Field(default=60, gt=0, le=600)


class Template(_Strict):
    """The definition of one kind of sandbox."""

    name: str
    folder: Path = Field(description="the directory with its template.toml", exclude=True)
    title: str = Field(min_length=1, max_length=100)
    description: str = Field(min_length=1, max_length=2000)
    language: LanguageName
    source: Source
    machine: MachineSize
    env: dict[Variable, str] = Field(default={}, description="environment of code, commands and the service")
    warmup: Warmup = Warmup()
    service: ServiceCommand | None = None
    pool: PoolMode = Field(default="pooled", description="whether machines are kept ready or started on demand")
    network: NetworkMode = Field(
        default=NetworkMode.PROXY, description="the most that sandboxes may ask for: none, proxy or nat", strict=False
    )
    user_namespaces: bool = Field(default=False, description="whether code may create namespaces and mount in them")

    @model_validator(mode="after")
    def _check_rehearsal(self) -> Self:
        if self.warmup.rehearsal and language(self.language).rehearsal is None:
            raise ValueError(f"warmup.rehearsal: {self.language} sandboxes would keep what it leaves behind")
        return self

    def resized(self, size: MachineSize) -> "Template":
        """Return the same template with machines of another size."""
        return self.model_copy(update={"machine": size})

    @property
    def packages(self) -> tuple[str, ...]:
        """The Debian packages and Python wheels that it names; empty for images, whose contents are unknown."""
        debian = self.source.debian
        return (*debian.packages, *debian.wheels, *(debian.dependencies or ())) if debian else ()
