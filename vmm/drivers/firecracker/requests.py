"""What Firecracker is asked to do: pure functions from a machine's spec to requests."""

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
from vmm.microvm.probe import Release
from vmm.types import MachineSpec
from vmm.vsock import CID

STATE = "/files/state"  # of the snapshot that the machine is restored from
NEW_MEMORY, NEW_STATE = "/files/new-memory", "/files/new-state"  # of one that is taken
# Virtualization inside of the machine, which Firecracker leaves to KVM: VMX of Intel, SVM of AMD. By leaf of CPUID.
NESTED = {"0x1": 5, "0x80000001": 2}
RENAMED = (1, 13)  # the first release with the newer name of the option that tracks changes
PAUSE, RESUME = Request("PATCH", "/vm", {"state": "Paused"}), Request("PATCH", "/vm", {"state": "Resumed"})


def boot(spec: MachineSpec) -> list[Request]:
    """Return the requests that configure and start a new machine."""
    devices: dict[str, dict[str, Any]] = {
        "/drives/image": _drive("image", IMAGE, spec, read_only=True),
        "/drives/disk": _drive("disk", DISK, spec, read_only=False),
        "/entropy": {},
    }
    return _start(spec, KERNEL_ARGS, devices)


def try_kernel(spec: MachineSpec) -> list[Request]:
    """Return the requests that boot a machine with a vsock only. Its console is Firecracker's output."""
    return _start(spec, PROBE_ARGS, {})


def _start(spec: MachineSpec, kernel_args: str, devices: Mapping[str, dict[str, Any]]) -> list[Request]:
    bodies: dict[str, dict[str, Any]] = {
        "/machine-config": {"vcpu_count": spec.vcpus, "mem_size_mib": spec.memory_mb},
        "/cpu-config": {"cpuid_modifiers": [_without(leaf, bit) for leaf, bit in NESTED.items()]},
        "/boot-source": {"kernel_image_path": KERNEL, "initrd_path": INITRAMFS, "boot_args": kernel_args},
        "/vsock": {"guest_cid": CID, "uds_path": f"/{AGENT_SOCKET}"},
        **devices,
        "/actions": {"action_type": "InstanceStart"},
    }
    return [Request("PUT", path, body) for path, body in bodies.items()]


def _without(leaf: str, bit: int) -> dict[str, Any]:
    """Return what clears a bit of ECX."""
    bitmap = "0b" + "".join("0" if at == bit else "x" for at in reversed(range(32)))
    return {"leaf": leaf, "subleaf": "0x0", "flags": 0, "modifiers": [{"register": "ecx", "bitmap": bitmap}]}


def save(*, changes_only: bool) -> Request:
    """Return the request that saves a machine that stands still: all memory, or what changed since the last time."""
    kind = "Diff" if changes_only else "Full"
    body = {"snapshot_type": kind, "snapshot_path": NEW_STATE, "mem_file_path": NEW_MEMORY}
    return Request("PUT", "/snapshot/create", body)


def load(release: Release) -> Request:
    """Return the request that continues a saved machine.

    Its memory is mapped copy-on-write. Firecracker remembers what changes, so that a copy of the machine is quick, and
    does not bring all of its memory in.

    `clock_realtime` (1.16 and newer) is left out: Firecracker refuses it on hosts whose KVM does not save the time with
    the machine, and the guest's monotonic clock would jump. The agent sets the wall clock.
    """
    backend = {"backend_type": "File", "backend_path": MEMORY}
    tracking = "track_dirty_pages" if release >= RENAMED else "enable_diff_snapshots"
    body = {"snapshot_path": STATE, "mem_backend": backend, "resume_vm": True, tracking: True}
    return Request("PUT", "/snapshot/load", body)


def _drive(name: str, path: str, spec: MachineSpec, *, read_only: bool) -> dict[str, Any]:
    limits = {"rate_limiter": buckets(spec.disk_rate)} if spec.disk_rate else {}
    return {"drive_id": name, "path_on_host": path, "is_root_device": False, "is_read_only": read_only, **limits}
