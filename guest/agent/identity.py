"""Makes this machine different from every other clone of its snapshot. Needs root; reports what was not allowed.

All files are opened before the snapshot is taken: on an emulated CPU, looking up a path after the restore costs more
than the change itself. /etc/hostname, /etc/machine-id and /etc/resolv.conf are links to files on a tmpfs.
"""

import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from guest.agent.device import configure
from guest.offline.pip import NETWORK

RNDADDENTROPY = 0x40085203  # ioctl: mix bytes into the kernel's pool and credit them as entropy
RNDRESEEDCRNG = 0x5207  # ioctl: reseed the generator from the pool at once
RANDOM_DEVICE = "/dev/urandom"
HOSTNAME_FILE = "/run/mcp-sandbox/hostname"
MACHINE_ID_FILE = "/run/mcp-sandbox/machine-id"
RESOLVERS_FILE = "/run/mcp-sandbox/resolv.conf"
NO_NETWORK = "none"


class Identity:
    """The entropy, clock, host name and machine id of this machine."""

    def __init__(self) -> None:
        self._random = _open(RANDOM_DEVICE, os.O_WRONLY)
        self._hostname = _open(HOSTNAME_FILE, os.O_WRONLY | os.O_CREAT)
        self._machine_id = _open(MACHINE_ID_FILE, os.O_WRONLY | os.O_CREAT)
        self._name_length = 0
        self._network = NO_NETWORK

    def credit_entropy(self, entropy: bytes) -> bool:
        """Give the kernel's random number generator new entropy and reseed it immediately."""
        try:
            fcntl.ioctl(self._random, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
            fcntl.ioctl(self._random, RNDRESEEDCRNG)
        except (OSError, ValueError):  # ValueError: the device could not be opened
            return False
        return True

    def set_clock(self, unix_ns: int) -> None:
        """Set the wall clock where that is allowed. The host compares the time in the answer with its own."""
        with suppress(OSError):
            time.clock_settime_ns(time.CLOCK_REALTIME, unix_ns)

    def set_network(self, mode: str) -> bool:
        """Tell package managers whether this machine has a network; returns whether that is new.

        A snapshot has none, so usually nothing changes.
        """
        if mode == self._network:
            return False
        self._network = mode
        with suppress(OSError):
            if mode == NO_NETWORK:
                os.unlink(NETWORK)  # noqa: PTH108 - pathlib is expensive under emulation
            else:
                os.close(os.open(NETWORK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        return True

    def set_device(self, device: dict[str, Any] | None) -> None:
        """Configure the network device if the host gave this machine one; raise OSError."""
        if device is None:
            return
        if device["address"] is not None:  # else the driver has done it
            configure(str(device["address"]), str(device["gateway"]))
        with open(RESOLVERS_FILE, "w") as file:  # noqa: PTH123 - pathlib is expensive under emulation
            file.writelines(f"nameserver {address}\n" for address in device["resolvers"])

    def set_name(self, hostname: str, machine_id: str) -> bool:
        """Set the host name and the machine id in /etc, and the host name in the kernel if that is allowed."""
        try:
            os.pwrite(self._machine_id, machine_id.encode() + b"\n", 0)
            length = os.pwrite(self._hostname, hostname.encode() + b"\n", 0)
            if length != self._name_length:  # the names of clones all have one length
                os.ftruncate(self._hostname, length)
                self._name_length = length
            socket.sethostname(hostname)  # last, because it is not allowed everywhere
        except OSError:
            return False
        return True


def _open(path: str, flags: int) -> int:
    """Return a descriptor, or -1, with which every later call fails with an OSError."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError:
        return -1
