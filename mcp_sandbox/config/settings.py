"""All settings in one model."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from mcp_sandbox.config.base import Group, absolute_path, split
from mcp_sandbox.config.files import file_values, project_config_file, user_config_file
from mcp_sandbox.config.host_dirs import HostDirs
from mcp_sandbox.config.limits import (
    FileSettings,
    LifetimeSettings,
    LimitSettings,
    OutputSettings,
    PoolSettings,
    RunSettings,
)
from mcp_sandbox.config.names import APP
from mcp_sandbox.config.network import NetworkSettings
from mcp_sandbox.config.serve import LogSettings, OAuthSettings, ServeSettings
from mcp_sandbox.config.sources import environment_values, merged
from mcp_sandbox.config.web import WebSettings
from templates.catalogue import Catalogue
from vmm.types import Isolation

AUTO = "auto"  # for `driver` and `accel`: the best one that works on this host
Toolset = Literal["default", "advanced", "sandboxes", "code", "commands", "files", "web", "forks", "handlers"]


class Settings(BaseModel):
    """All settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    home: Path = Field(
        default_factory=lambda: platformdirs.user_data_path(APP),
        description="Directory of images, snapshots and running machines.",
    )
    driver: str = Field(AUTO, description="How machines run: auto, or a driver's name.")
    min_isolation: Isolation = Field(Isolation.NAMESPACE, description="Refuse drivers that isolate less.")
    accel: Literal["auto", "kvm", "tcg"] = Field("auto", description="How a virtual machine's CPU runs.")
    guest_kernel: Path | None = Field(None, description="Guest kernel to use instead of Debian's.")
    guest_modules: Path | None = Field(None, description="Modules directory of that kernel.")
    firecracker: Path | None = Field(None, description="Firecracker's program, if it is not on the PATH.")
    cloud_hypervisor: Path | None = Field(None, description="Cloud Hypervisor's program, if it is not on the PATH.")
    runsc: Path | None = Field(None, description="gVisor's program, instead of the one that setup or the PATH has.")
    template: str = Field("python-data-analysis", description="Default template.")
    template_path: tuple[Path, ...] = Field(
        default_factory=lambda: (platformdirs.user_config_path(APP) / "templates",),
        description="Directories of custom templates, searched before the built-in ones.",
    )
    toolsets: tuple[Toolset, ...] = Field(
        ("default",), min_length=1, description="Groups of tools offered to clients; advanced has all."
    )
    web_tools: bool = Field(True, description="Offer web_search and fetch_url.")
    allow_nat: bool = Field(False, description="Let sandboxes have a network device behind the host's address.")
    host_dirs: HostDirs = Field(
        (), description="Directories of the host that upload_file and download_file may use: NAME=PATH[:rw][:http]."
    )
    tools: tuple[str, ...] = Field((), description="The only tools offered, instead of toolsets.")
    read_only: bool = Field(False, description="Offer only tools that change nothing.")
    connect: str | None = Field(
        None,
        description="Address of a shared server: stdin and stdout are connected to it instead of to a server here.",
    )
    token: str | None = Field(None, repr=False, description="Token for that server.")
    tracing: bool = Field(False, description="Emit OpenTelemetry spans if opentelemetry-api is installed.")

    limits: LimitSettings = LimitSettings()
    pool: PoolSettings = PoolSettings()
    lifetime: LifetimeSettings = LifetimeSettings()
    runs: RunSettings = RunSettings()
    output: OutputSettings = OutputSettings()
    files: FileSettings = FileSettings()
    web: WebSettings = WebSettings()
    network: NetworkSettings = NetworkSettings()
    log: LogSettings = LogSettings()
    serve: ServeSettings = ServeSettings()
    oauth: OAuthSettings = OAuthSettings()

    def __init__(self, **flags: Any) -> None:  # noqa: ANN401 - pydantic checks them
        """Fill the settings from all sources.

        Raises:
            ConfigError: a configuration file cannot be used.
            pydantic.ValidationError: a value is wrong.
        """
        names = [name for name, _ in setting_names()]
        project = file_values(project_config_file(), names, trusted=False)
        user = file_values(user_config_file(), names, trusted=True)
        super().__init__(**merged(flags, environment_values(names), project, user))

    @field_validator("home", "guest_kernel", "guest_modules", "firecracker", "cloud_hypervisor", "runsc", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """Refuse paths that depend on the working directory, which may be a stranger's repository."""
        return None if path is None else absolute_path(path)

    @model_validator(mode="after")
    def _host_dirs_are_apart(self) -> Self:
        """Refuse names that are used twice, and access to our own files: tokens, snapshots, what machines run."""
        names = [folder.name for folder in self.host_dirs]
        if len(set(names)) < len(names):
            raise ValueError("host_dirs uses a name twice")
        home = self.home.resolve()
        for folder in self.host_dirs:
            path = folder.path.resolve()
            if path.is_relative_to(home) or home.is_relative_to(path):
                raise ValueError(f"host_dirs: {folder.path} contains the server's home or is in it")
        return self

    @field_validator("template_path", mode="after")
    @classmethod
    def _all_absolute(cls, path: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(map(absolute_path, path))

    @field_validator("template_path", mode="before")
    @classmethod
    def _split_path(cls, value: object) -> object:
        """Split the environment variable, which lists directories as PATH does."""
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @field_validator("toolsets", "tools", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Split a flag or an environment variable, which separates names by commas."""
        return split(value)

    @property
    def catalogue(self) -> Catalogue:
        """All templates, built-in and custom."""
        return Catalogue(self.template_path)

    @property
    def binaries(self) -> dict[str, Path | None]:
        """Programs that the operator chose, by driver."""
        return {"firecracker": self.firecracker, "cloud-hypervisor": self.cloud_hypervisor, "gvisor": self.runsc}

    @property
    def run_dir(self) -> Path:
        """Scratch directory of running machines."""
        return self.home / "run"

    @property
    def cache_dir(self) -> Path:
        """Probe verdicts about this host."""
        return self.home / "cache"

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values for settings such as `driver` or `pool.min`."""
        update: dict[str, Any] = {}
        for name, value in values.items():
            group, _, field = name.partition(".")
            if field:
                update[group] = update.get(group, getattr(self, group)).model_copy(update={field: value})
            else:
                update[name] = value
        return self.model_copy(update=update)


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting as `name` or `group.name`, with its field."""
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from ((f"{name}.{inner}", info) for inner, info in field.annotation.model_fields.items())
        else:
            yield name, field
