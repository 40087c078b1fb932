"""What descriptions of tools say about the settings."""

from mcp_sandbox.config import EVERY_DOMAIN, Settings

MAX_DOMAINS = 20  # that a description names


def may_be_online(settings: Settings) -> bool:
    """Return whether any sandbox can have a network."""
    return settings.network.enabled or settings.allow_nat


def network_of(settings: Settings) -> str:
    """Describe which network sandboxes have. Without this, models try to install packages, or never do."""
    if not may_be_online(settings):
        return "Sandboxes are offline: packages cannot be installed; put them into the template."
    modes = []
    if settings.network.enabled:
        modes.append(f'network="proxy" (http and https, also for pip and git, to {domains_of(settings)})')
    if settings.allow_nat:
        modes.append('network="nat" (a network device)')
    return f"Sandboxes are offline unless create_sandbox gets {' or '.join(modes)}; one-off sandboxes always are."


def domains_of(settings: Settings) -> str:
    """Describe the domains that the operator allows."""
    allowed = settings.network.allow_domains
    if EVERY_DOMAIN in allowed:
        return "every public domain"
    more = f" and {len(allowed) - MAX_DOMAINS} more" if len(allowed) > MAX_DOMAINS else ""
    return ", ".join(allowed[:MAX_DOMAINS]) + more


def lifetime_of(settings: Settings) -> str:
    """Describe how long a sandbox lives."""
    return (
        f"A sandbox lives until close_sandbox, {span(settings.lifetime.idle_s)} without use, "
        f"{span(settings.lifetime.max_age_s)} in all, or the end of this server process, whichever is first"
    )


def span(seconds: float) -> str:
    """Return a duration in hours, minutes or seconds."""
    for unit_s, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} seconds"
