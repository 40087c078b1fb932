"""What a template.toml says, checked the moment it is read."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Language = Literal["python", "cpp", "go", "shell"]
PoolMode = Literal["pooled", "cold", "singleton"]
VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
Variable = Annotated[str, StringConstraints(pattern=VARIABLE)]
# Both go onto command lines, a reference behind "docker://" and a file behind the template's directory.
ImageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9\[][^\s\x00]*$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[\w-][^/\x00]*(/[\w-][^/\x00]*)*$")]  # nothing of it is ".."

# Both go onto the command line of a package manager: a name must never look like an option or a path.
# One of another suite is called like golang-go/trixie.
DebianPackage = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]+(/(bookworm|trixie))?$")]
Command = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]+$")]
Wheel = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.!+_-]+$")
]


class _Strict(BaseModel):
    """A table of template.toml: fixed once read, and a key it does not know is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DebianSource(_Strict):
    """Files taken from a Debian suite, with Python wheels on top."""

    suite: Literal["bookworm", "trixie"]
    packages: list[DebianPackage] = []
    run: list[Command] = Field(default=[], description="shell commands, run as root in the image after its packages")
    wheels: list[Wheel] = Field(default=[], description="exact versions, so that a rebuild gives the same machine")


class Source(_Strict):
    """Where the files of a machine come from: one of these."""

    debian: DebianSource | None = None
    oci: ImageName | None = Field(
        default=None, description="name:tag, name@sha256:…, oci:DIR, oci-archive:FILE or docker-archive:FILE"
    )
    dockerfile: FileName | None = Field(default=None, description="a Dockerfile in the template's directory")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(type(self).model_fields)}")
        return self


class MachineSize(_Strict):
    """How big a machine of this template is."""

    memory_mb: int = Field(ge=128, le=65536)
    vcpus: int = Field(default=1, ge=1, le=64)
    disk_mb: int = Field(ge=64, le=1_048_576, description="room for what the machine writes")


class Warmup(_Strict):
    """What runs once, before the snapshot, so that no sandbox has to wait for it."""

    code: str = ""


class ServiceCommand(_Strict):
    """A process that is started before the snapshot and alive in every sandbox."""

    start_cmd: str | None = Field(default=None, min_length=1, description="for a shell; none: the image's ENTRYPOINT")
    ready_cmd: str = Field(min_length=1, description="a shell command that succeeds as soon as the process serves")
    env: dict[Variable, str] = {}
    cwd: str | None = Field(default=None, description="none: the image's WORKDIR, or /workspace")
    ready_timeout_s: float = Field(default=60, gt=0, le=600)


class Template(_Strict):
    """One kind of sandbox."""

    name: str
    folder: Path = Field(description="where its template.toml lies", exclude=True)
    title: str = Field(min_length=1, max_length=100)
    description: str = Field(min_length=1, max_length=2000)
    language: Language
    source: Source
    machine: MachineSize
    env: dict[Variable, str] = Field(default={}, description="what code, commands and the service find set")
    warmup: Warmup = Warmup()
    service: ServiceCommand | None = None
    pool: PoolMode = Field(
        default="pooled", description="machines kept ready; started when asked for; or one that is shared by all"
    )
