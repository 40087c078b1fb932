"""Starts the agent, on the virtio port called `agent` or, with `--stdio`, on its standard input and output."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH123, PTH208

import argparse
import os
from contextlib import suppress

from guest.agent.requests import Agent
from guest.agent.user import parse_user
from guest.places import CACHE, CONFIG, WORKSPACE

PORT_NAME = "agent"
PORTS = "/sys/class/virtio-ports"


def find_port() -> str:
    """The device of the virtio port named `agent`."""
    for device in os.listdir(PORTS):
        with open(f"{PORTS}/{device}/name") as file:
            if file.read().strip() == PORT_NAME:
                return f"/dev/{device}"
    raise SystemExit(f"agent: this machine has no virtio port named {PORT_NAME!r}")


def open_channel(*, stdio: bool) -> tuple[int, int]:
    """Descriptors to read from and write to the host. Nothing else in this process may print to them."""
    if stdio:
        channel = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.dup2(2, 1)
        return channel
    fd = os.open(find_port(), os.O_RDWR | os.O_CLOEXEC)
    return fd, fd


def main() -> None:
    """Start the agent."""
    parser = argparse.ArgumentParser(prog="guest.agent", description="The agent in a sandbox's machine.")
    parser.add_argument("--stdio", action="store_true", help="speak over stdin and stdout")
    parser.add_argument("--user", default="1000:1000", help="UID:GID that code runs as; none: the agent's own")
    options = parser.parse_args()
    user = parse_user(options.user)
    channel = open_channel(stdio=options.stdio)
    user.make_places()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    with suppress(OSError):  # it does little, but has to be heard among any number of busy processes
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    os.environ.update(HOME=WORKSPACE, USER="sandbox", LOGNAME="sandbox", LANG="C.UTF-8", SHELL="/bin/sh")
    os.environ.update(XDG_CONFIG_HOME=CONFIG, XDG_CACHE_HOME=CACHE)
    os.umask(0o022)
    Agent(channel, user, ends_with_host=options.stdio).serve()


if __name__ == "__main__":
    main()
