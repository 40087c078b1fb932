"""The OCI bundle and the command lines of a gVisor machine, computed from its spec."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmm.agent import ENVIRONMENT, agent_argv
from vmm.limits import rlimit_argv
from vmm.namespaces import in_namespaces
from vmm.scratch import mode_of, scratch_mb
from vmm.types import GuestCode, MachineSpec, NetworkMode

NAME = "machine"  # each machine has its own state directory, so all can have the same name

# Threads on the host: one for each thread of the machine, and gVisor's own.
THREADS = 768

STATE, BUNDLE = "/run/runsc", "/run/bundle"
CONFIG, ROOT = f"{BUNDLE}/config.json", f"{BUNDLE}/root"
CHECKPOINT = "/run/checkpoint"  # the files to restore from
# Releases up to 2024 take a network namespace that has the file rmem_default for the host's own, and refuse to use it.
# Since Linux 6.11 all namespaces have it (google/gvisor#10704).
HOST_MARK = "/proc/sys/net/core"
HOST_MEMORY = "/proc/meminfo"  # whose total gVisor shows to code as the machine's

# The agent needs these to give files to the user, to become the user and to kill the user's processes. They are
# privileges in gVisor's kernel, not in the host's.
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP"),
    *("CAP_SYS_ADMIN", "CAP_SYS_NICE", "CAP_SYS_RESOURCE"),
)


def runsc_argv(binary: str, platform: str, network: NetworkMode = NetworkMode.NONE) -> list[str]:
    """Return runsc with our options; append a command."""
    # `sandbox` is gVisor's own network stack on the devices of the namespace; `none` is the same with a loopback only.
    stack = "sandbox" if network is NetworkMode.NAT else "none"
    return [
        *(binary, f"--root={STATE}", f"--platform={platform}", f"--network={stack}", "--overlay2=none"),
        # The caller moves the whole machine into a cgroup.
        *("--ignore-cgroups", "--host-uds=none"),
    ]


def in_machine(
    argv: list[str],
    config: int,
    checkpoint: Mapping[str, int],
    *,
    memory_mb: int | None = None,
    programs: bool = False,
    gated: bool = False,
) -> list[str]:
    """Return `argv`, a command of gVisor, in new namespaces, with a bundle whose config.json is the open file `config`.

    `checkpoint` are the open files of a checkpoint. gVisor tells code that the machine has `memory_mb`; else the host's
    memory. With `programs` the namespaces have programs of the host. If
    `gated`, the command waits until its network namespace has a device.
    """
    files = {CONFIG: config, **{f"{CHECKPOINT}/{name}": file for name, file in checkpoint.items()}}
    # Inside the namespaces the kernel counts only the machine's processes, outside all of the user's.
    limits = rlimit_argv(processes=THREADS)
    covered = [HOST_MARK] if gated else []
    replaced = {} if memory_mb is None else {HOST_MEMORY: f"MemTotal: {memory_mb * 1024} kB"}
    return in_namespaces(
        argv,
        programs=programs,
        folders=[ROOT],
        covered=covered,
        replaced=replaced,
        files=files,
        limits=limits,
        gated=gated,
    )


def enter_argv(first_pid: int, uid: int, argv: list[str]) -> list[str]:
    """Return `argv` in the namespaces of a running machine, as the user `uid` who owns them."""
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid != os.geteuid() else []
    return [
        *user,
        *("nsenter", f"--target={first_pid}", "--user", "--preserve-credentials", "--mount", "--pid", "--", *argv),
    ]


def config_json(spec: MachineSpec, image: str) -> bytes:
    """Return the OCI config of a machine whose root file system is the erofs file `image`."""
    size = ("--memory-mb", str(spec.memory_mb), "--cpus", str(spec.vcpus))
    agent = agent_argv("--one-kernel", "--own-kernel", *size)
    bundle = {
        **_process(agent, dict(ENVIRONMENT), spec.network),
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            *(_tmpfs(place, megabytes) for place, megabytes in scratch_mb(spec).items()),
        ],
        "annotations": {"dev.gvisor.spec.rootfs.source": image, "dev.gvisor.spec.rootfs.type": "erofs"},
    }
    return json.dumps(bundle, sort_keys=True).encode()


def probe_json() -> bytes:
    """Return the OCI config of a minimal machine, which runs a program of the host that does nothing."""
    return json.dumps({**_process(["true"], dict(ENVIRONMENT)), "root": {"path": "/", "readonly": True}}).encode()


def recipe() -> str:
    """Return a hash of the machines that this module describes: a checkpoint of another kind cannot be restored."""
    spec = MachineSpec("machine", Path("/"), GuestCode(Path("/")), memory_mb=1024, vcpus=1, disk_mb=1024)
    parts = (config_json(spec, "/"), *runsc_argv("runsc", ""))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _process(argv: list[str], environment: dict[str, str], network: NetworkMode = NetworkMode.NONE) -> dict[str, Any]:
    capabilities = list(CAPABILITIES)
    namespaces: list[dict[str, str]] = [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]
    if network is NetworkMode.NAT:  # a device is in the namespace that gVisor is started in
        namespaces[1]["path"] = "/proc/1/ns/net"
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 1024}],
        },
        "root": {"path": ROOT, "readonly": True},
        "linux": {"namespaces": namespaces},
    }


def _tmpfs(place: str, megabytes: int) -> dict[str, Any]:
    options = [f"size={megabytes}m", f"mode={mode_of(place)}"]
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options}
