"""Configures this machine's network device, with the ioctls of ifconfig and route."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH110, PTH112, PTH123, PTH208

import fcntl
import os
import socket
import struct
from contextlib import suppress

NAME = b"eth0"
DEVICES, DRIVER = "/sys/bus/virtio/devices", "/sys/bus/virtio/drivers/virtio_net"
NETWORK_CARD = "0x0001"  # of virtio's kinds of devices
SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
IFF_UP, RTF_UP, RTF_GATEWAY = 1, 1, 2
ALL_BITS = 32


def configure(address: str, gateway: str) -> None:
    """Give the device an address such as "198.18.0.2/30" and a default route, and switch it on."""
    _bind()
    ip, _, bits = address.partition("/")
    mask = socket.inet_ntoa(struct.pack("!I", (1 << ALL_BITS) - (1 << ALL_BITS - int(bits))))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFADDR, struct.pack("16s16s8x", NAME, _socket_address(ip)))
        fcntl.ioctl(control, SIOCSIFNETMASK, struct.pack("16s16s8x", NAME, _socket_address(mask)))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", NAME, IFF_UP))
        with suppress(FileExistsError):  # a refresh may be repeated
            fcntl.ioctl(control, SIOCADDRT, _default_route(gateway))


def _bind() -> None:
    """Give the network card to its driver. A snapshot has a card without one, so that other machines have no device."""
    if not os.path.isdir(DRIVER):
        raise OSError("the guest kernel has no driver for its network card: virtio_net")
    for device in os.listdir(DEVICES):
        with open(f"{DEVICES}/{device}/device") as kind:
            if kind.read().strip() == NETWORK_CARD and not os.path.exists(f"{DEVICES}/{device}/driver"):
                with open(f"{DRIVER}/bind", "w") as bind:
                    bind.write(device)


def _socket_address(ip: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ip))


def _default_route(gateway: str) -> bytes:
    """Return the kernel's struct rtentry."""
    everywhere = _socket_address("0.0.0.0")  # noqa: S104 - a destination
    flags = RTF_UP | RTF_GATEWAY
    return struct.pack("L16s16s16sHhLPhPLLH0L", 0, everywhere, _socket_address(gateway), everywhere, flags, *(0,) * 8)
