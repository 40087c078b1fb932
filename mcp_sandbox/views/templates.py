"""A template as users see it."""

from pydantic import Field

from mcp_sandbox.views.base import View


class TemplateView(View):
    """A template: what a sandbox made from it has."""

    name: str
    title: str
    language: str
    memory_mb: int
    vcpus: int
    disk_mb: int
    built: bool | None = Field(None, description="Whether it is ready on this host; null: not checked.")
    problem: str | None = Field(None, description="Errors in template.toml, one line each.")
