"""Starts the agent on the virtio port called `agent`, on standard input and output, or on a vsock port."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH115, PTH123, PTH208

import argparse
import os
import signal
from contextlib import suppress

from guest.agent.listener import listen_on_vsock
from guest.agent.processors import Processors
from guest.agent.requests import Agent
from guest.agent.user import User, parse_user
from guest.places import CACHE, CONFIG, WORKSPACE
from guest.prctl import set_dumpable

PORT_NAME = "agent"
PORTS = "/sys/class/virtio-ports"
PRIVATE = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # variables of the agent that code does not get
FIRST_PID_NAMESPACE = "pid:[4026531836]"


def find_port() -> str:
    """Return the device of the virtio port named `agent`."""
    for device in os.listdir(PORTS):
        with open(f"{PORTS}/{device}/name") as file:
            if file.read().strip() == PORT_NAME:
                return f"/dev/{device}"
    raise SystemExit(f"agent: this machine has no virtio port named {PORT_NAME!r}")


def take_pipes() -> tuple[int, int]:
    """Return standard input and output as the channel to the host, and redirect what this process prints."""
    channel = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return channel


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="guest.agent", description="The agent in a sandbox's machine.")
    channel = parser.add_mutually_exclusive_group()
    channel.add_argument("--stdio", action="store_true", help="serve the host on stdin and stdout")
    channel.add_argument("--vsock", type=int, metavar="PORT", help="serve hosts that connect to this vsock port")
    parser.add_argument("--user", default="1000:1000", help="UID:GID that code runs as; none: the agent's own")
    parser.add_argument("--own-pids", action="store_true", help="every visible process may be killed; with --user none")
    parser.add_argument("--one-kernel", action="store_true", help="keep no warm process besides the one that runs code")
    parser.add_argument("--memory-mb", type=int, default=0, help="memory of code, files included")
    parser.add_argument("--cpus", type=int, default=0, help="CPUs that code sees; needs root and --own-kernel")
    parser.add_argument("--own-kernel", action="store_true", help="/proc/meminfo is about this machine alone")
    options = parser.parse_args()
    if options.own_pids and in_first_pid_namespace():
        parser.error("--own-pids needs a PID namespace: it ends every visible process")
    return options


def in_first_pid_namespace() -> bool:
    """Return whether this is the first PID namespace of a system; Linux gives it a fixed number."""
    return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE


def protect_agent(user: User) -> None:
    """Keep code from killing, starving or reading the agent, as far as this machine allows it."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    with suppress(OSError):  # it does little, but must respond among any number of busy processes
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    if user.shares_id:
        set_dumpable(dumpable=False)
        # Process 1 of a PID namespace ignores signals from inside that it has no handler for.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the agent."""
    options = parse_options()
    user = parse_user(
        options.user, own_pids=options.own_pids, memory_mb=options.memory_mb, own_kernel=options.own_kernel
    )
    pipes = take_pipes() if options.stdio else None
    processors = None
    if options.cpus:
        with suppress(OSError):  # a kernel that does not allow it shows all of the host's
            processors = Processors(options.cpus)
    user.make_places()
    protect_agent(user)
    for name in PRIVATE:
        os.environ.pop(name, None)
    os.environ.update(HOME=WORKSPACE, USER="sandbox", LOGNAME="sandbox", LANG="C.UTF-8", SHELL="/bin/sh")
    os.environ.update(XDG_CONFIG_HOME=CONFIG, XDG_CACHE_HOME=CACHE)
    os.umask(0o022)
    agent = Agent(user, one_kernel=options.one_kernel, processors=processors)
    if pipes:
        agent.serve_pipes(pipes)
    elif options.vsock is not None:
        agent.serve_connections(listen_on_vsock(options.vsock))
    else:
        agent.serve_port(os.open(find_port(), os.O_RDWR | os.O_CLOEXEC))


if __name__ == "__main__":
    main()
