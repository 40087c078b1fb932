"""Directories in a machine that its code, its callers and the agent all know by name."""

WORKSPACE = "/workspace"  # where code runs and relative paths start
OUTPUTS = "/tmp/outputs"  # noqa: S108 - artifacts; the whole machine belongs to one owner
CONFIG = "/tmp/.config"  # noqa: S108 - what libraries store for themselves, hidden from the user
CACHE = "/tmp/.cache"  # noqa: S108 - the same
INSTALLED = "/tmp/.local"  # noqa: S108 - packages that code installs
SETTINGS = "/tmp/.ipython"  # noqa: S108 - what IPython insists on writing
AGENT_PYTHON = "/usr/lib/mcp-sandbox/python3"  # runs the agent, independent of what the image has installed
BUILD = "/tmp/.build"  # noqa: S108 - where code is compiled; emptied before every run
