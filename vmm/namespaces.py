"""Namespaces of a machine's own, with a new root directory.

The root is a small tmpfs with nothing of the host in it but what its options name. The host's root is unmounted before
the machine's program starts, so there is no path to the host's files, whatever happens to the program. The pid
namespace ends with its first process, and the mounts end with the last one: nothing has to be cleaned up.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vmm.process import ANNOUNCE

UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--kill-child=KILL", "--propagation=private"),
)
ROOT_MB = 16  # gVisor's state and its copy of the configuration are in the root, too
STAGE = "/mnt"  # every system has it, and machines need nothing in it
OLD = "old"
# What programs of the host need to run: nothing here is private. The package managers of some systems use other places.
PROGRAMS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"),
    *("/nix/store", "/gnu/store"),
)
DEVICES = ("/dev/null", "/dev/urandom")
PROC = f"proc {STAGE}/proc proc nosuid,nodev,noexec 0 0"


def in_namespaces(
    argv: Sequence[str],
    *,
    programs: bool,
    devices: Iterable[str] = (),
    folders: Iterable[str] = (),
    covered: Iterable[str] = (),
    replaced: Mapping[str, str] | None = None,
    files: Mapping[str, int] | None = None,
    limits: Sequence[str] = (),
    gated: bool = False,
    root_mb: int = ROOT_MB,
) -> list[str]:
    """Return a command that becomes `argv` in new namespaces.

    `argv` sees the host's programs only with `programs`; without, it has to be an open, static program. `folders` are
    empty directories, and `covered` are directories of /proc that look empty, `replaced` are
    files of /proc that have one line of text instead. Each of `files` is a link to an open file
    that the command inherits. `limits` is the start of a command that sets limits on processes, which the kernel counts
    by user namespace. It can write `root_mb` to its root directory. If `gated`, the command announces its namespaces
    and waits for the answer (see `ANNOUNCE`).
    """
    script = _script(
        (*DEVICES, *devices), folders, covered, replaced or {}, files or {}, programs=programs, root_mb=root_mb
    )
    if gated:
        script = f"{ANNOUNCE} && {script}"
    return [*UNSHARE, *limits, "sh", "-c", script, "sh", *argv]


def _script(
    devices: Iterable[str],
    folders: Iterable[str],
    covered: Iterable[str],
    replaced: Mapping[str, str],
    files: Mapping[str, int],
    *,
    programs: bool,
    root_mb: int,
) -> str:
    # The tools below need the host's programs, even if the machine does not get them. On most systems /bin and others
    # are links into /usr, and programs such as QEMU find their files from the real path of the program.
    links = [path for path in PROGRAMS if Path(path).is_symlink()]
    shown = [path for path in (*PROGRAMS, *devices) if Path(path).exists() and path not in links]
    plain = [path for path in shown if not Path(path).is_dir()]
    parents = {str(Path(path).parent) for path in (*plain, *files)}
    new = sorted({"/proc", "/tmp", *folders, *parents, *shown} - {*plain})  # noqa: S108 - the machine's own
    hidden = [] if programs else [path for path in shown if path in PROGRAMS]
    empty = (f"tmpfs {STAGE}{path} tmpfs ro,size=4k,nosuid,nodev,noexec 0 0" for path in covered)
    texts = (f"{STAGE}/{Path(path).name} {STAGE}{path} none bind 0 0" for path in replaced)
    table = [PROC, *empty, *texts, *(f"{path} {STAGE}{path} none rbind 0 0" for path in shown)]
    lines = [
        f"mount -t tmpfs -o size={root_mb}m,mode=700,nosuid,nodev tmpfs {STAGE}",
        f"cd {STAGE}",
        f"mkdir -p {OLD} {shlex.join(f'.{path}' for path in new)}",
        *([f"cp --no-dereference {shlex.join(links)} ."] if links else []),
        *(f": >.{path}" for path in plain),
        *(f"printf '%s\\n' {shlex.quote(text)} >{Path(path).name}" for path, text in replaced.items()),
        *(f"ln -s /proc/self/fd/{file} .{path}" for path, file in files.items()),
        # One process mounts everything: starting a process takes longer than a mount.
        f"printf '%s\\n' {shlex.join(table)} >{OLD}/fstab",
        f"mount --all --fstab {STAGE}/{OLD}/fstab",
        f": >{OLD}/fstab",
        f"pivot_root . {OLD}",
        f"umount --lazy {shlex.join((f'/{OLD}', *hidden))}",
        "cd /",
        'exec "$@"',
    ]
    return " && ".join(lines)
