"""The process settings of an OCI image: validate them, use what can be used, explain the rest."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from guest.places import WORKSPACE
from templates.errors import InvalidTemplate, Problem
from templates.model import VARIABLE, Template
from templates.tools import StepFailed

MAX_CHARS = 8192  # of all settings together: they travel to the agent in one frame's header
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # Python's names and OCI's
# Variables that an image may not set, and why.
REFUSED = {
    "HOME": f"the home of code is {WORKSPACE}",
    "LD_AUDIT": "the sandbox's agent would load it too",
    "LD_PRELOAD": "the sandbox's agent would load it too",
}


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The settings of an OCI image; empty for images made from Debian packages."""

    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()  # ENTRYPOINT and CMD
    workdir: str | None = None
    user: str | None = None  # not used, but explained by `explain`
    left_out: tuple[str, ...] = ()  # refused variables


_Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _OciSettings(_Strict):
    env: list[_Text] | None = Field(default=None, alias="Env")
    entrypoint: list[_Text] | None = Field(default=None, alias="Entrypoint")
    cmd: list[_Text] | None = Field(default=None, alias="Cmd")
    workdir: _Text | None = Field(default=None, alias="WorkingDir")
    user: _Text | None = Field(default=None, alias="User")


class _OciConfig(_Strict):
    """The fields we use of an OCI image configuration."""

    os: str = "linux"
    architecture: str | None = None
    config: _OciSettings | None = None


def read_config(document: object) -> ImageConfig:
    """Read an image's configuration; raises StepFailed if it is damaged or for another platform."""
    try:
        image = _OciConfig.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        place = ".".join(map(str, details["loc"]))
        raise StepFailed(f"the image's configuration is damaged: {place}: {details['msg']}") from None
    _check_platform(image)
    settings = image.config or _OciSettings()
    env = dict(entry.partition("=")[::2] for entry in settings.env or ())
    config = ImageConfig(
        env={name: value for name, value in env.items() if VARIABLE.match(name) and name not in REFUSED},
        command=(*(settings.entrypoint or ()), *(settings.cmd or ())),
        workdir=settings.workdir or None,
        user=settings.user or None,
        left_out=tuple(sorted(name for name in env if name in REFUSED)),
    )
    if len(str(config)) > MAX_CHARS:
        raise StepFailed(f"the image's ENV, ENTRYPOINT and CMD are longer than {MAX_CHARS} characters")
    return config


def to_details(config: ImageConfig) -> dict[str, Any]:
    """Convert a configuration for the store."""
    return {**asdict(config), "env": dict(config.env)}


def from_details(details: Mapping[str, Any]) -> ImageConfig:
    """Return the configuration in an entry's details; empty for images made from Debian packages."""
    stored = details.get("config")
    if stored is None:
        return ImageConfig()
    return ImageConfig(**{**stored, "command": tuple(stored["command"]), "left_out": tuple(stored["left_out"])})


def check_service(template: Template, config: ImageConfig) -> None:
    """Raise InvalidTemplate if the template has a service but there is no command to start it."""
    if template.service and not template.service.start_cmd and not config.command:
        problem = Problem("add it; the image has no ENTRYPOINT and no CMD", "service.start_cmd")
        raise InvalidTemplate(template.folder / "template.toml", problem)


def explain(template: Template, config: ImageConfig) -> list[str]:
    """Return a sentence for each setting of the image that is not used as its author may expect."""
    notes = [f"ENV {name} is ignored: {REFUSED[name]}." for name in config.left_out]
    if config.user not in (None, "root", "0"):
        notes.append(f"USER {config.user} is ignored: code runs as user sandbox, who can read all files of the image.")
    if config.workdir not in (None, "/", WORKSPACE):
        used = "; the service starts in it" if template.service and not template.service.cwd else ""
        notes.append(f"WORKDIR {config.workdir} is not where code starts: that is {WORKSPACE}{used}.")
    command = " ".join(config.command)
    if command and template.service is None:
        notes.append(f"ENTRYPOINT and CMD ({command}) are not started: add a [service] to template.toml for that.")
    elif command and template.service and template.service.start_cmd:
        notes.append(f"ENTRYPOINT and CMD ({command}) are not started: [service] has its own start_cmd.")
    return notes


def _check_platform(image: _OciConfig) -> None:
    wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
    if image.os != "linux" or image.architecture not in (wanted, None):
        raise StepFailed(f"the image is for {image.os} on {image.architecture}; this host runs linux on {wanted}")
