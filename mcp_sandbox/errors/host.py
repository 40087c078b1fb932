"""Errors of templates, the host and what it allows."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError

MAX_DOMAINS = 50  # that an error names


@dataclass(eq=False)
class TemplateNotBuilt(SandboxError):
    """The template has no build for this host and driver."""

    code = "template_not_built"
    sentence = "Template {template!r} is not built on this host."
    template: str


@dataclass(eq=False)
class TemplateDamaged(SandboxError):
    """Files of the template's build are damaged, so its machines cannot start."""

    code = "template_damaged"
    sentence = "The build of template {template!r} is damaged ({part}), so its machines cannot start."
    template: str
    part: str


@dataclass(eq=False)
class UnknownTemplate(SandboxError):
    """No template has this name."""

    code = "template_not_found"
    template: str
    known: list[str]

    def __str__(self) -> str:
        return f"There is no template {self.template!r}. Choose one of: {', '.join(self.known) or '(none)'}."


@dataclass(eq=False)
class UnusableTemplate(SandboxError):
    """The template's template.toml has errors; the problem has one line for each."""

    code = "template_invalid"
    sentence = "Template {template!r} has errors in template.toml:\n{problem}"
    template: str
    problem: str


@dataclass(eq=False)
class HostNotReady(SandboxError):
    """This host cannot run machines as configured."""

    code = "host_not_ready"
    sentence = "This host cannot start sandboxes: {reason}."
    reason: str
    fix: str | None = None


@dataclass(eq=False)
class NoHost(SandboxError):
    """No host can run the machine that was asked for."""

    code = "no_host"
    sentence = "No host can run this sandbox: {reason}."
    reason: str


@dataclass(eq=False)
class NetworkRefused(SandboxError):
    """A sandbox may not have the network that was asked for. Only subclasses are raised."""

    code = "network_refused"


@dataclass(eq=False)
class NetworkNotEnabled(NetworkRefused):
    """The operator has not enabled the network mode that was asked for."""

    code = "network_not_enabled"
    sentence = "The operator has not enabled network mode {mode} for sandboxes."
    mode: str
    setting: str  # what would enable it


@dataclass(eq=False)
class NetworkNotInTemplate(NetworkRefused):
    """The template's sandboxes may not have the network mode that was asked for."""

    code = "network_not_in_template"
    sentence = "Sandboxes of template {template!r} have at most network mode {most}, not {mode}."
    template: str
    mode: str
    most: str


@dataclass(eq=False)
class NetworkUnsupported(NetworkRefused):
    """The driver has no such network mode on this host."""

    code = "network_unsupported"
    sentence = "Driver {driver} has no network mode {mode} on this host."
    driver: str
    mode: str


@dataclass(eq=False)
class DomainNotAllowed(NetworkRefused):
    """A domain is outside of what the operator allows."""

    code = "domain_not_allowed"
    domain: str
    allowed: list[str]

    def __str__(self) -> str:
        shown = ", ".join(self.allowed[:MAX_DOMAINS]) + (", …" if len(self.allowed) > MAX_DOMAINS else "")
        return f"The operator does not allow {self.domain!r}. Allowed domains: {shown}."


@dataclass(eq=False)
class HostLost(SandboxError):
    """A host is gone, and with it the machines and saved states that were on it."""

    code = "host_lost"
    sentence = "Host {host} was lost: {reason}."
    host: str
    reason: str


@dataclass(eq=False)
class DiskFull(SandboxError):
    """The host's disk is full, or its memory where files are kept in memory."""

    code = "host_disk_full"
    sentence = "The sandbox could not be {action}: the server's disk is full."
    action: str


@dataclass(eq=False)
class TooWeak(SandboxError):
    """The chosen driver isolates less than the settings require."""

    code = "isolation_too_weak"
    sentence = "Driver {driver} has isolation level {isolation}, but min_isolation = {least} requires more."
    driver: str
    isolation: str
    least: str
