"""The bundle and the command lines of a gVisor machine, as functions of what the machine is."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vmm.agent import ENVIRONMENT, agent_argv
from vmm.limits import rlimit_argv
from vmm.types import GuestCode, MachineSpec

NAME = "machine"  # every machine has a gVisor state directory to itself, so all can be called the same

# What gVisor itself may take beside the machine's memory and files: its heap, page tables, one stub for each process.
OVERHEAD_MB = 256
# Threads on the host: each one of the machine has a twin there, and gVisor some of its own.
THREADS = 768
SMALL_MB, RUN_MB = 64, 16
TMP_SHARE = 2  # /tmp gets this fraction of the disk on top

# A world of its own for each machine: the first process of the process namespace takes all others with it, and the
# mounts go with the last of them. So there is nothing to delete afterwards, and nothing that could be forgotten.
NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--kill-child=KILL", "--mount-proc", "--propagation=private"),
)
STATE, BUNDLE = "/run/runsc", "/run/bundle"
# gVisor's state and the bundle lie in memory that only this machine's processes see.
PREPARE = (
    f"mount -t tmpfs -o size={RUN_MB}m,mode=700 tmpfs /run && mkdir -p {BUNDLE}/root && "
    f'cat "/proc/self/fd/$1" >{BUNDLE}/config.json && shift && exec "$@"'
)

# The agent needs these to make files the user's, to become the user and to end what the user runs. They are rights
# towards gVisor's kernel, not towards the host's.
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP"),
    *("CAP_SYS_ADMIN", "CAP_SYS_NICE", "CAP_SYS_RESOURCE"),
)


def runsc_argv(binary: str, platform: str) -> list[str]:
    """gVisor with our settings; a command follows."""
    return [
        *(binary, f"--root={STATE}", f"--platform={platform}", "--network=none", "--overlay2=none"),
        # The caller puts the whole machine into a control group.
        *("--ignore-cgroups", "--host-uds=none"),
    ]


def in_namespaces(config: int, argv: list[str]) -> list[str]:
    """`argv` in namespaces of its own, with the bundle whose config is the descriptor `config`."""
    # Inside the namespaces the kernel counts the machine's processes alone, outside all of the user's.
    return [*NAMESPACES, "sh", "-c", PREPARE, "sh", str(config), *rlimit_argv(processes=THREADS), *argv]


def enter_argv(first_pid: int, uid: int, argv: list[str]) -> list[str]:
    """`argv` in the namespaces of a machine that is running, as the user `uid` that they belong to."""
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid != os.geteuid() else []
    return [
        *user,
        *("nsenter", f"--target={first_pid}", "--user", "--preserve-credentials", "--mount", "--pid", "--", *argv),
    ]


def config_json(spec: MachineSpec, image: str) -> bytes:
    """The OCI description of a machine whose root file system is the erofs file `image`."""
    agent = agent_argv("--one-kernel", "--memory-mb", str(spec.memory_mb))
    bundle = {
        **_process(agent, dict(ENVIRONMENT)),
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            _tmpfs("/run", RUN_MB, "0755"),
            _tmpfs("/workspace", spec.disk_mb, "0755"),
            _tmpfs("/tmp", spec.disk_mb // TMP_SHARE, "1777"),  # noqa: S108 - the machine's own
            _tmpfs("/var/tmp", SMALL_MB, "1777"),  # noqa: S108
            _tmpfs("/dev/shm", SMALL_MB, "1777"),  # noqa: S108
        ],
        "annotations": {"dev.gvisor.spec.rootfs.source": image, "dev.gvisor.spec.rootfs.type": "erofs"},
    }
    return json.dumps(bundle, sort_keys=True).encode()


def probe_json() -> bytes:
    """The smallest machine there is: a program of the host's that does nothing."""
    return json.dumps({**_process(["true"], dict(ENVIRONMENT)), "root": {"path": "/", "readonly": True}}).encode()


def disk_mb(spec: MachineSpec) -> int:
    """All that a machine may write to files; it lies in the host's memory."""
    return spec.disk_mb + spec.disk_mb // TMP_SHARE + 2 * SMALL_MB + RUN_MB


def recipe() -> str:
    """What kind of machine this module makes: a checkpoint of another kind cannot be restored."""
    spec = MachineSpec("machine", Path("/"), GuestCode(Path("/")), memory_mb=1, vcpus=1, disk_mb=2)
    told = (config_json(spec, "/"), *runsc_argv("runsc", ""), PREPARE)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _process(argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
    capabilities = list(CAPABILITIES)
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
        "root": {"path": f"{BUNDLE}/root", "readonly": True},
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _tmpfs(place: str, megabytes: int, mode: str) -> dict[str, Any]:
    options = [f"size={megabytes}m", f"mode={mode}"]
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options}
