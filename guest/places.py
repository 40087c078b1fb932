"""The directories in a machine that its code, its callers and the agent all know by name."""

WORKSPACE = "/workspace"  # where code runs and relative paths start
OUTPUTS = "/tmp/outputs"  # noqa: S108 - artifacts; the whole machine belongs to one owner
SETTINGS = "/tmp/.ipython"  # noqa: S108 - what IPython insists on writing
