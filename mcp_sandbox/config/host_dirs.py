"""Directories of the host that tools may copy files from and to."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from mcp_sandbox.config.base import absolute_path, split

HOST_DIR_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class HostDir:
    """A directory of the host that tools may copy files from and, if it is writable, to."""

    name: str  # what models call it; they never see the path
    path: Path
    writable: bool
    http: bool  # also for clients of `mcp-sandbox serve`

    @classmethod
    def parse(cls, text: object) -> "HostDir":
        """Read `NAME=PATH`, with the options `:rw` and `:http` at its end. Raises ValueError."""
        if not isinstance(text, str):
            raise ValueError("it must be a list of texts like data=/srv/data or out=/srv/out:rw")  # noqa: TRY004
        name, _, rest = text.strip().partition("=")
        path, *options = re.split(r":(?=(?:ro|rw|http)(?:$|:))", rest)
        if not HOST_DIR_NAME.fullmatch(name) or not path:
            raise ValueError(f"{text!r} is not like data=/srv/data or out=/srv/out:rw")
        return cls(name, absolute_path(Path(path)), "rw" in options, "http" in options)

    def __str__(self) -> str:
        return f"{self.name}={self.path}{':rw' * self.writable}{':http' * self.http}"


HostDirs = Annotated[
    tuple[Annotated[HostDir, BeforeValidator(HostDir.parse), PlainSerializer(str)], ...],
    BeforeValidator(split),
]
