"""The environment variables that programs of a build get.

They start from an empty environment: the operator's may contain secrets, and what a maintainer script, a RUN or a `run`
command sees can end up in an image that every sandbox reads. Only programs that run no such code get more than proxies.
"""

import os
import re

_PROXIES = re.compile(r"(http|https|ftp|all|no)_proxy", re.IGNORECASE)
# Which certificates to trust, for Python, curl and Go.
_CERTIFICATES = re.compile(r"SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE")
_PIP = re.compile(r"PIP_\w+|HOME|NETRC|XDG_CONFIG_HOME|XDG_CACHE_HOME")


def proxies() -> dict[str, str]:
    """Return what programs need to reach the network."""
    return _matching(_PROXIES)


def certificates() -> dict[str, str]:
    """Return which certificates the operator's programs trust."""
    return _matching(_CERTIFICATES)


def pip_settings() -> dict[str, str]:
    """Return the operator's settings for pip: its index, logins, certificates and cache."""
    return {**certificates(), **_matching(_PIP)}


def _matching(names: re.Pattern[str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if names.fullmatch(name)}
