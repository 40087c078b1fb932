"""Answer `initialize` before anything else is imported, with what the last server said in the same circumstances.

What a server says about itself depends on its settings and on this host. Reading those takes most of the time to the
answer, so the last server's instructions are kept in the home. They are used again while nothing has changed that
they depend on. If they turn out to be wrong nevertheless, the server ends: see `Greeting.prepare`.
"""

import hashlib
import json
import os
import select
from contextlib import suppress
from pathlib import Path

import platformdirs

from mcp_sandbox.serving.initialize import NAME, answer_to, parse_initialize
from vmm.errors import Untrusted
from vmm.trust import read_trusted

READ_BYTES = 1 << 16
PIPE_WRITE_BYTES = 4096  # PIPE_BUF: what a pipe that polls as writable takes without blocking
HOME = "MCP_SANDBOX_HOME"
VARIABLES = ("MCP_SANDBOX_", "XDG_", "DBUS_", "HOME", "PATH")  # the start of their names
# The code whose text or defaults they contain. It may be edited in place.
CODE = ("config/*.py", "serving/greeting.py", "serving/initialize.py", "tools/descriptions.py", "machines/provider.py")
FILES = "greeting-*.json"  # in the home's cache; the star is the start of the digest
DIGITS = 16
KEPT = 8  # greetings: clients start servers with different variables
PROC = ("/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/osrelease", "/proc/self/cgroup")
PRIVILEGES = ("Uid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp")  # lines of /proc/self/status


class EarlyGreeting:
    """What was read from the client, and answered, before the server itself has started."""

    def __init__(self, circumstances: str | None = None) -> None:
        self.received = b""
        self.answered: int | str | None = None  # the request's id
        self.told: str | None = None  # the instructions in the answer
        self._circumstances = circumstances  # None: nothing is kept

    def answer(self, wire_in: int, wire_out: int) -> None:
        """Answer the client's first line, if it is there and the answer is known. Does not wait."""
        known = self._recall()
        if known is None or not select.select([wire_in], [], [], 0)[0]:
            return
        self.received = os.read(wire_in, READ_BYTES)
        line, newline, _ = self.received.partition(b"\n")
        request = parse_initialize(line) if newline else None
        if request is None:
            return
        answer = answer_to(request, *known).encode()
        if len(answer) <= PIPE_WRITE_BYTES and select.select([], [wire_out], [], 0)[1]:
            os.write(wire_out, answer)
            self.answered, (self.told, _) = request["id"], known

    def keep(self, instructions: str, version: str) -> None:
        """Keep what the next server is to say, if possible. The home is not created for it."""
        file = self._file()
        if file is None or self._recall() == (instructions, version):
            return
        known = {"circumstances": self._circumstances, "instructions": instructions, "version": version}
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(known))
            scratch.replace(file)
            newest_first = sorted(file.parent.glob(FILES), key=os.path.getmtime, reverse=True)
            for old in newest_first[KEPT:]:
                old.unlink()

    def forget(self) -> None:
        """Keep nothing for the next server."""
        file = self._file()
        if file is not None:
            with suppress(OSError):
                file.unlink()

    def _recall(self) -> tuple[str, str] | None:
        """Return the instructions and the version of the last server in the same circumstances."""
        file = self._file()
        if file is None:
            return None
        with suppress(OSError, Untrusted, ValueError, KeyError, TypeError):  # a damaged file only costs time
            known = json.loads(read_trusted(file))
            if known["circumstances"] == self._circumstances:
                return str(known["instructions"]), str(known["version"])
        return None

    def _file(self) -> Path | None:
        """Return the file in the home. A home that the configuration file names is not known yet."""
        home = _home()
        if self._circumstances is None or not home.is_absolute():
            return None
        return home / "cache" / FILES.replace("*", self._circumstances[:DIGITS])


def greet_early() -> EarlyGreeting:
    """Answer the client on stdin and stdout, if it can be answered now."""
    early = EarlyGreeting(_circumstances())
    with suppress(OSError):  # the client is gone, as the server will notice
        early.answer(0, 1)
    return early


def _home() -> Path:
    return Path(os.environ.get(HOME) or platformdirs.user_data_path(NAME)).expanduser()


def _circumstances() -> str | None:
    """Return a digest of what the instructions depend on; None if it cannot be told. Variables may be secret."""
    config = platformdirs.user_config_path(NAME)
    package = Path(__file__).parent.parent
    folders = os.environ.get("PATH", "").split(os.pathsep)  # a program may have been installed or removed
    try:
        depends_on = [
            sorted(variable for variable in os.environ.items() if variable[0].startswith(VARIABLES)),
            [_identity(path) for path in (Path.cwd() / f"{NAME}.toml", config / f"{NAME}.toml")],
            [_identity(path) for pattern in CODE for path in sorted(package.glob(pattern))],
            [_identity(path) for path in (_home() / "program", Path("/dev/kvm"))],
            [_identity(Path(folder)) for folder in folders],
            [Path(name).read_text() for name in PROC],
            [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(PRIVILEGES)],
        ]
    except OSError:
        return None
    return hashlib.sha256(json.dumps(depends_on).encode(errors="surrogateescape")).hexdigest()


def _identity(path: Path) -> list[int] | None:
    """Return what tells a file or directory from one that has changed since; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns, status.st_mode]
