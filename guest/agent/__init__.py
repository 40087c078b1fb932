"""The agent: the process in a machine that does what the host asks. `python -m guest.agent [--stdio]`."""
