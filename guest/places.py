"""The directories in a machine that its code, its callers and the agent all know by name."""

WORKSPACE = "/workspace"  # where code runs and relative paths start
OUTPUTS = "/tmp/outputs"  # noqa: S108 - artifacts; the whole machine belongs to one owner
CONFIG = "/tmp/.config"  # noqa: S108 - what libraries keep for themselves, out of the user's sight
CACHE = "/tmp/.cache"  # noqa: S108 - the same
SETTINGS = "/tmp/.ipython"  # noqa: S108 - what IPython insists on writing
AGENT_PYTHON = "/usr/lib/mcp-sandbox/python3"  # what the agent runs in, whatever is or is not in the image
BUILD = "/tmp/.build"  # noqa: S108 - where code is compiled; emptied before every run
