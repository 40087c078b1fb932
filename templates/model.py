"""What a template.toml says, checked the moment it is read."""

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from templates.errors import InvalidTemplate, UnknownTemplate

BUILT_IN = Path(__file__).parent  # every directory here with a template.toml is a template
FILE_NAME = "template.toml"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")

Language = Literal["python", "cpp", "go", "shell"]
PoolMode = Literal["pooled", "cold", "singleton"]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

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
    oci: str | None = Field(
        default=None, description="name:tag, name@sha256:…, oci:DIR, oci-archive:FILE or docker-archive:FILE"
    )
    dockerfile: str | None = Field(default=None, description="a Dockerfile in the template's directory")

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


def load_template(name: str, root: Path = BUILT_IN) -> Template:
    """Read the template called `name`; raises UnknownTemplate or InvalidTemplate."""
    path = root / name / FILE_NAME
    if not NAME.fullmatch(name) or not path.is_file():
        known = ", ".join(sorted(_names(root))) or "none"
        raise UnknownTemplate(f"there is no template called {name!r}; there are: {known}")
    status = path.stat()
    return _parsed(path, (status.st_ino, status.st_mtime_ns, status.st_size))


def find_templates(root: Path = BUILT_IN) -> dict[str, Template]:
    """All templates in `root`, by name; one that cannot be read raises InvalidTemplate."""
    return {name: load_template(name, root) for name in sorted(_names(root))}


@lru_cache(maxsize=64)
def _parsed(path: Path, _making: tuple[int, ...]) -> Template:
    """A template as its file says now. Reading it takes a millisecond, which every new sandbox would feel."""
    return parse_template(path)


def parse_template(path: Path) -> Template:
    """Read one template.toml; its name is that of the directory it lies in."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidTemplate(f"{path}: this is not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidTemplate(f"{path}: cannot be read: {error.strerror}") from None
    if "name" in table:
        raise InvalidTemplate(f"{path}: name: remove it; a template is called what its directory is called")
    if "folder" in table:
        raise InvalidTemplate(f"{path}: folder: remove it; that is where this file lies")
    try:
        return Template.model_validate({"name": path.parent.name, "folder": path.parent, **table})
    except ValidationError as error:
        raise InvalidTemplate("\n".join(_explain(path, error))) from None


def _names(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob(f"*/{FILE_NAME}") if NAME.fullmatch(path.parent.name)}


def _explain(path: Path, error: ValidationError) -> list[str]:
    """One line for each problem: the file, the field, what is wrong and what would be right."""
    advice = {
        "extra_forbidden": "there is no such field; remove it or mend its spelling",
        "missing": "this field is required; add it",
    }
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"])
        text = advice.get(problem["type"], problem["msg"])
        if "wheels" in problem["loc"] and problem["type"] == "string_pattern_mismatch":
            text = f"{problem['input']!r} must name one exact version, like 'numpy==2.4.6'"
        lines.append(f"{path}: {field}: {text}")
    return lines
