"""What Cloud Hypervisor is asked to do: pure functions from a machine's spec to requests."""

from collections.abc import Mapping
from typing import Any

from vmm.microvm.api import Request
from vmm.microvm.layout import (
    AGENT_SOCKET,
    DISK,
    IMAGE,
    INITRAMFS,
    KERNEL,
    KERNEL_ARGS,
    MEMORY,
    PROBE_ARGS,
    buckets,
)
from vmm.types import MachineSpec
from vmm.vsock import CID

MIB = 1024 * 1024
API = "/api/v1"
SAVED, CONFIG, STATE = "/files/saved", "config.json", "state.json"  # the snapshot that a machine is restored from
NEW, NEW_MEMORY = "/new", "memory-ranges"  # one that is taken

HELLO = Request("GET", f"{API}/vmm.ping")
PAUSE, RESUME = Request("PUT", f"{API}/vm.pause"), Request("PUT", f"{API}/vm.resume")


def config(spec: MachineSpec, *, restored: bool = False) -> dict[str, Any]:
    """Return the description of a machine.

    The memory of a restored one is a private, copy-on-write mapping of the snapshot's, and it does not need to boot.
    """
    zone: dict[str, Any] = {"id": "memory", "size": spec.memory_mb * MIB, "shared": False}
    payload = {"kernel": KERNEL, "cmdline": KERNEL_ARGS}
    if restored:
        zone["file"] = MEMORY
    else:
        payload["initramfs"] = INITRAMFS
    return {
        "cpus": {"boot_vcpus": spec.vcpus, "max_vcpus": spec.vcpus, "nested": False},
        "memory": {"size": 0, "thp": False, "zones": [zone]},  # huge pages would be copied whole
        "payload": payload,
        "disks": [_disk("image", IMAGE, spec, read_only=True), _disk("disk", DISK, spec, read_only=False)],
        "vsock": {"id": "vsock", "cid": CID, "socket": f"/{AGENT_SOCKET}"},
        "rng": {"src": "/dev/urandom"},
        "serial": {"mode": "Off"},
        "console": {"mode": "Off"},
    }


def boot(spec: MachineSpec) -> list[Request]:
    """Return the requests that configure and start a new machine."""
    return _start(config(spec))


def try_kernel(spec: MachineSpec) -> list[Request]:
    """Return the requests that boot a machine without disks. Its console is Cloud Hypervisor's output."""
    payload = {"kernel": KERNEL, "initramfs": INITRAMFS, "cmdline": PROBE_ARGS}
    return _start({**config(spec), "payload": payload, "disks": None, "serial": {"mode": "Tty"}})


def _start(machine: Mapping[str, Any]) -> list[Request]:
    return [Request("PUT", f"{API}/vm.create", machine), Request("PUT", f"{API}/vm.boot")]


def save() -> Request:
    """Return the request that saves a machine that stands still, with all of its memory."""
    return Request("PUT", f"{API}/vm.snapshot", {"destination_url": f"file://{NEW}"})


def load() -> list[Request]:
    """Return the requests that continue a saved machine."""
    return [Request("PUT", f"{API}/vm.restore", {"source_url": f"file://{SAVED}", "prefault": False}), RESUME]


def _disk(name: str, path: str, spec: MachineSpec, *, read_only: bool) -> dict[str, Any]:
    limits = {"rate_limiter_config": buckets(spec.disk_rate)} if spec.disk_rate else {}
    # Its type is stated, because a guest could write the header of another one to its disk.
    return {"id": name, "path": path, "readonly": read_only, "image_type": "Raw", **limits}
