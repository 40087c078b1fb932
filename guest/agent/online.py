"""What programs are told while this machine may open streams: the proxy that carries them."""

from collections.abc import Mapping

from guest.agent.tunnel import PORT
from guest.environment import Changes

PROXY = f"http://127.0.0.1:{PORT}"
OWN = "localhost,127.0.0.1,::1"  # servers in this machine

# curl reads http_proxy in lower case only, other programs the rest.
_LOWER = {"http_proxy": PROXY, "https_proxy": PROXY, "no_proxy": OWN}
VARIABLES: Mapping[str, str] = {
    **_LOWER,
    **{name.upper(): value for name, value in _LOWER.items()},
    "PIP_RETRIES": "1",  # a refused domain stays refused, and pip repeats its warning with every try
}


def changes(mode: str) -> Changes:
    """Return how a network mode changes the environment of programs."""
    return VARIABLES if mode == "proxy" else dict.fromkeys(VARIABLES)
