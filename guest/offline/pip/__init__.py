"""Stands in for pip where somebody calls `python -m pip`: says what to do where nothing can be installed.

Whoever imports pip gets the real one, or none where there is none: this module makes way.
"""

# pathlib and the rest of the library would be loaded into every program that only asks whether there is a pip
# ruff: noqa: PTH120

import os
import sys
from importlib import import_module

HERE = os.path.dirname(os.path.dirname(__file__))
ADVICE = (
    "this sandbox is offline, so nothing can be installed in it. A package has to be in the template that the sandbox "
    "is made from: add it to {field} in a template.toml (`mcp-sandbox template init` writes one to start from), "
    "run `mcp-sandbox template build`, and create a sandbox with that template. "
    "If you cannot do that yourself, ask the user, or do without the package."
)


def make_way() -> None:
    """Let the next import find the pip that is behind this one."""
    sys.path[:] = [path for path in sys.path if path != HERE]
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__]:
        del sys.modules[name]


if __name__ == "pip" and sys.argv[:1] != ["-m"]:
    make_way()
    import_module(__name__)  # whoever imports this gets that
