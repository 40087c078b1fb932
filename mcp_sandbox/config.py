"""The settings: one model, filled from flags, MCP_SANDBOX_* variables and mcp-sandbox.toml, in that order."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from templates.catalogue import Catalogue
from vmm.types import Isolation

APP = "mcp-sandbox"
CONFIG_NAME = "mcp-sandbox.toml"
ENV_PREFIX = "MCP_SANDBOX_"
AUTO = "auto"  # of a driver or an accelerator: the best one that works here


class ConfigError(Exception):
    """A setting is unknown or has a value it may not have; the message names it and where it came from."""


class Settings(BaseSettings):
    """What can be configured. Field names are the keys of the file and give the flags their names."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=True
    )

    home: Path = Field(
        default_factory=lambda: platformdirs.user_data_path(APP),
        description="Where images, snapshots and running machines are kept.",
    )
    driver: str = Field(AUTO, description="How machines run: auto, or a driver's name.")
    min_isolation: Isolation = Field(Isolation.NAMESPACE, description="Nothing that isolates less is ever used.")
    accel: Literal["auto", "kvm", "tcg"] = Field("auto", description="How a virtual machine's CPU is run.")
    guest_kernel: Path | None = Field(None, description="A guest kernel to use instead of the built one.")
    guest_modules: Path | None = Field(None, description="The modules directory of that kernel, if it has any.")
    template: str = Field("python-data-analysis", description="The template used when none is named.")
    template_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default_factory=lambda: (platformdirs.user_config_path(APP) / "templates",),
        description="Directories with templates of your own; they come before the built-in ones.",
    )
    toolset: Literal["default", "advanced"] = Field(
        "default", description="Tools clients get: advanced adds fork, pause and resume."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="How much the server tells on stderr."
    )
    log_format: Literal["text", "json"] = Field("text", description="Lines for people, or JSON for machines.")
    tracing: bool = Field(False, description="Make OpenTelemetry spans, where that package is installed.")

    max_sandboxes: int = Field(8, ge=1, le=1000, description="Sandboxes alive at once.")
    max_memory_mb: int | None = Field(None, ge=128, description="Memory all sandboxes may have together.")
    max_owner_sandboxes: int | None = Field(None, ge=1, description="Sandboxes one owner may have at once.")
    max_owner_memory_mb: int | None = Field(None, ge=128, description="Memory the sandboxes of one owner may have.")
    max_owner_runs: int | None = Field(None, ge=1, description="Runs one owner may have on at once.")
    queue_timeout_s: float = Field(20, ge=0, description="Seconds a new sandbox waits for a place within the limits.")
    max_owner_paused: int | None = Field(None, ge=0, description="Paused sandboxes one owner may have at once.")
    max_paused: int = Field(8, ge=0, le=1000, description="Paused sandboxes at once; their state lies on disk.")
    max_restores: int = Field(4, ge=1, le=64, description="Machines being restored at once.")
    pool_min: int = Field(1, ge=0, le=64, description="Machines of each template kept ready.")
    pool_max: int = Field(4, ge=0, le=64, description="Most of them after a burst of requests; 0 keeps none ready.")
    pool_memory_mb: int = Field(4096, ge=0, description="Memory of all machines kept ready, by their templates' size.")
    pool_max_age_s: float = Field(3600, gt=0, description="Seconds after which a machine kept ready is replaced.")
    pool_idle_s: float = Field(600, gt=0, description="Seconds after which a burst of requests is forgotten.")
    idle_timeout_s: float = Field(900, gt=0, description="Seconds without use after which a sandbox ends.")
    max_idle_timeout_s: float = Field(3600, gt=0, description="Most seconds without use a caller may ask for.")
    max_lifetime_s: float = Field(14_400, gt=0, description="Seconds after which a sandbox ends in any case.")
    run_timeout_s: float = Field(30, gt=0, description="Seconds a run may take when the caller does not say.")
    max_run_timeout_s: float = Field(600, gt=0, description="Most seconds a caller may ask for.")
    # Many clients give up on a call after 60 s, and what it did is lost to them.
    foreground_s: float = Field(45, gt=0, description="Seconds after which a call leaves its run in the background.")

    # A guest sends this much of each stream while it runs, then only the end; the rest goes to a file in the sandbox.
    live_output_bytes: int = Field(512 << 10, ge=1024, le=16 << 20, description="Start of a stream seen live.")
    kept_runs: int = Field(16, ge=1, le=1000, description="Results of background runs a sandbox keeps.")
    kept_run_bytes: int = Field(8 << 20, ge=1024, description="Bytes those results may have together.")

    # One result should stay near 10,000 tokens: two streams of head and tail are 32 KiB, about 8,000; the rest of a
    # result has limits of its own in tools.results.
    output_head_bytes: int = Field(8192, ge=256, le=1 << 20, description="Start of an output stream shown.")
    output_tail_bytes: int = Field(8192, ge=256, le=1 << 20, description="End of an output stream shown.")
    read_text_bytes: int = Field(32_768, ge=1024, le=1 << 20, description="Most text one read returns.")
    max_code_bytes: int = Field(1 << 20, ge=1024, le=1 << 20, description="Longest code run_code takes.")
    max_write_bytes: int = Field(16 << 20, ge=1024, description="Largest file write_file takes.")
    max_read_bytes: int = Field(16 << 20, ge=1024, description="Largest file handed out as image or resource.")
    max_list_entries: int = Field(500, ge=1, le=10_000, description="Most entries a listing shows.")
    inline_images: int = Field(4, ge=0, le=32, description="New pictures shown in the result of a run.")
    inline_image_bytes: int = Field(2 << 20, ge=0, description="Bytes all those pictures may have together.")

    @field_validator("template_path", mode="before")
    @classmethod
    def _directories(cls, value: object) -> object:
        """A variable holds several directories as PATH does."""
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @property
    def catalogue(self) -> Catalogue:
        """The templates there are."""
        return Catalogue(self.template_path)

    @property
    def run_dir(self) -> Path:
        """Scratch of running machines."""
        return self.home / "run"

    @property
    def cache_dir(self) -> Path:
        """Verdicts about this host that are worth keeping."""
        return self.home / "cache"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - given by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - given by name
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags win over variables, variables over the file; nothing else is read."""
        return init_settings, env_settings, _TomlFile(settings_cls)


class _TomlFile(PydanticBaseSettingsSource):
    """The values of the first configuration file there is."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ANN401, ARG002
        return None, field_name, False  # values are handed over all at once, below

    def __call__(self) -> dict[str, Any]:
        path = find_config_file()
        if path is None:
            return {}
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        unknown = sorted(values.keys() - Settings.model_fields.keys())
        if unknown:
            raise ConfigError(f"{path}: unknown setting {', '.join(map(repr, unknown))}")
        return values


def find_config_file() -> Path | None:
    """The configuration file in force: the one in the working directory, else the user's own."""
    places = (Path.cwd() / CONFIG_NAME, platformdirs.user_config_path(APP) / CONFIG_NAME)
    return next((path for path in places if path.is_file()), None)


def load_settings(**flags: Any) -> Settings:  # noqa: ANN401 - pydantic checks them
    """The settings in force. A flag that is None was not given."""
    try:
        settings = Settings(**{key: value for key, value in flags.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        source = find_config_file()
        raise ConfigError(f"bad setting: {problems} (from a flag, {ENV_PREFIX}* or {source or CONFIG_NAME})") from error
    if settings.run_timeout_s > settings.max_run_timeout_s:
        raise ConfigError("run_timeout_s is greater than max_run_timeout_s")
    if settings.idle_timeout_s > settings.max_idle_timeout_s:
        raise ConfigError("idle_timeout_s is greater than max_idle_timeout_s")
    path = tuple(directory.expanduser().absolute() for directory in settings.template_path)
    return settings.model_copy(update={"home": settings.home.expanduser().absolute(), "template_path": path})
