"""What runs in a machine beside the code: does what the host asks. `python -m guest.agent [--stdio]`."""
