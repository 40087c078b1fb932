"""A template as users see it."""

from pydantic import Field

from mcp_sandbox.views.base import View


class TemplateView(View):
    """A template: what a sandbox made from it has. A template with errors has only a name, a folder and the errors."""

    name: str
    folder: str | None = Field(None, description="Directory of a custom template; null: built in.")
    title: str | None = None
    description: str | None = Field(None, description="What it has, in few words.")
    language: str | None = None
    memory_mb: int | None = None
    vcpus: int | None = None
    disk_mb: int | None = None
    packages: list[str] | None = Field(None, description="Debian packages, and Python wheels with their versions.")
    built: bool | None = Field(None, description="Whether it is ready on this host; null: not checked.")
    build_bytes: int | None = Field(None, description="Size of its builds on this host; null: not checked.")
    problem: str | None = Field(None, description="Errors in template.toml, one line each.")
