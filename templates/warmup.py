"""What a machine of a template does before its first caller comes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from guest.client.messages import Service, WarmUp
from guest.places import WORKSPACE
from templates.model import Template

SHELL = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an OCI image says about the processes in it; empty for images of our own."""

    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()  # ENTRYPOINT and CMD
    workdir: str | None = None
    user: str | None = None  # not used: it is explained to whoever builds
    left_out: tuple[str, ...] = ()  # variables that are not taken over, explained too


def warm_up(template: Template, image: ImageConfig) -> WarmUp:
    """The warm-up of one template. What template.toml says goes before what the image says."""
    return WarmUp(
        language=template.language,
        code=template.warmup.code,
        env={**image.env, **template.env},
        service=_service(template, image),
    )


def _service(template: Template, image: ImageConfig) -> Service | None:
    wanted = template.service
    if wanted is None:
        return None
    return Service(
        command=(*SHELL, wanted.start_cmd) if wanted.start_cmd else image.command,
        ready=(*SHELL, wanted.ready_cmd),
        env=wanted.env,
        cwd=wanted.cwd or image.workdir or WORKSPACE,
        ready_timeout_s=wanted.ready_timeout_s,
    )
