"""What an OCI image says about the processes in it: read with suspicion, used where it can be, explained where not."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from guest.places import WORKSPACE
from templates.errors import InvalidTemplate
from templates.model import VARIABLE, Template
from templates.tools import StepFailed
from templates.warmup import ImageConfig

MAX_CHARS = 8192  # of all that is taken over: it travels to the agent in the header of one frame
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # Python's names and those of OCI
# What an image may not choose, and why.
NOT_TAKEN = {
    "HOME": f"the home of code is {WORKSPACE}",
    "LD_AUDIT": "it would be loaded into the sandbox's agent too",
    "LD_PRELOAD": "it would be loaded into the sandbox's agent too",
}


def read_config(described: object) -> ImageConfig:
    """What the configuration of an image says; raises StepFailed if it is damaged or for another machine."""
    if not isinstance(described, dict) or not isinstance(settings := described.get("config") or {}, dict):
        raise StepFailed("the image's configuration is damaged")
    _check_platform(described)
    env = dict(entry.partition("=")[::2] for entry in _texts(settings, "Env"))
    config = ImageConfig(
        env={name: value for name, value in env.items() if VARIABLE.match(name) and name not in NOT_TAKEN},
        command=(*_texts(settings, "Entrypoint"), *_texts(settings, "Cmd")),
        workdir=_text(settings, "WorkingDir"),
        user=_text(settings, "User"),
        left_out=tuple(sorted(name for name in env if name in NOT_TAKEN)),
    )
    if len(str(config)) > MAX_CHARS:
        raise StepFailed(f"the image's ENV, ENTRYPOINT and CMD are longer than {MAX_CHARS} characters")
    return config


def to_details(config: ImageConfig) -> dict[str, Any]:
    """A configuration as the store keeps it."""
    return {**asdict(config), "env": dict(config.env)}


def from_details(details: Mapping[str, Any]) -> ImageConfig:
    """The configuration that an entry of the store keeps; empty for images of our own."""
    kept = details.get("config")
    if kept is None:
        return ImageConfig()
    return ImageConfig(**{**kept, "command": tuple(kept["command"]), "left_out": tuple(kept["left_out"])})


def check_service(template: Template, config: ImageConfig) -> None:
    """Raise InvalidTemplate if there is nothing to be started as the service that a template wants."""
    if template.service and not template.service.start_cmd and not config.command:
        raise InvalidTemplate(
            f"{template.folder / 'template.toml'}: service.start_cmd: add it; the image has no ENTRYPOINT and no CMD"
        )


def explain(template: Template, config: ImageConfig) -> list[str]:
    """What becomes of the image's settings where that is not what its author may expect, a line each."""
    notes = [f"ENV {name} is not taken over: {NOT_TAKEN[name]}." for name in config.left_out]
    if config.user not in (None, "root", "0"):
        notes.append(
            f"USER {config.user} is not taken over: code runs as the user sandbox, who may read all files of the image."
        )
    if config.workdir not in (None, "/", WORKSPACE):
        used = "; the service starts in it" if template.service and not template.service.cwd else ""
        notes.append(
            f"WORKDIR {config.workdir} is not where code starts: that is {WORKSPACE}, which can be written to{used}."
        )
    command = " ".join(config.command)
    if command and template.service is None:
        notes.append(f"ENTRYPOINT and CMD ({command}) are not started: a [service] in template.toml does that.")
    elif command and template.service and template.service.start_cmd:
        notes.append(f"ENTRYPOINT and CMD ({command}) are not started: [service] has a start_cmd of its own.")
    return notes


def _check_platform(described: Mapping[str, Any]) -> None:
    system, made_for = described.get("os", "linux"), described.get("architecture")
    wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
    if system != "linux" or made_for not in (wanted, None):
        raise StepFailed(f"the image is for {system} on {made_for}, machines here are linux on {wanted}")


def _texts(settings: Mapping[str, Any], name: str) -> list[str]:
    values = settings.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) and "\0" not in value for value in values):
        raise StepFailed(f"the image's configuration is damaged: {name} is no list of texts")
    return values


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name) or None
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise StepFailed(f"the image's configuration is damaged: {name} is no text")
    return value
