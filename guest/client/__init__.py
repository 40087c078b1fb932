"""The host's end of the wire to a machine's agent."""

from guest.client.client import AgentClient

__all__ = ["AgentClient"]
