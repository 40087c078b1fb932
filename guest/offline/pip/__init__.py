"""Runs in front of pip: without a network, pip asks no index, and `python -m pip` prints advice if it fails.

`import pip` gets the real pip, if there is one: this module replaces itself.
"""

# pathlib would be loaded into every program that only checks whether pip exists
# ruff: noqa: PTH110, PTH120

import os
import sys
from importlib import import_module

NETWORK = "/run/mcp-sandbox/network"  # exists if the sandbox has a network, which is decided when it is leased
HERE = os.path.dirname(os.path.dirname(__file__))
ADVICE = (
    "this sandbox is offline; packages must be in its template, unless the operator allows sandboxes with "
    'network="proxy". To add one to a template: create it with '
    "`mcp-sandbox template init NAME`, add the package to {field} in its template.toml, "
    "run `mcp-sandbox template build NAME`, and create a sandbox with that template. "
    "If you cannot do that, ask the user, or do without the package."
)


def unload() -> None:
    """Make the next import find the real pip."""
    sys.path[:] = [path for path in sys.path if path != HERE]
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__]:
        del sys.modules[name]


if __name__ == "pip" and not os.path.exists(NETWORK):  # not when the agent imports this for the advice
    os.environ.setdefault("PIP_NO_INDEX", "1")
if __name__ == "pip" and sys.argv[:1] != ["-m"]:
    unload()
    import_module(__name__)  # the importer gets this one
