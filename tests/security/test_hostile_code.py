"""What hostile code can do to its own machine: little, and nothing to the agent."""

import json

import pytest

from guest.errors import RequestRefused
from guest.protocol import MAX_LISTING
from tests.functional.machines import Clone, Machines
from vmm.types import Isolation

pytestmark = pytest.mark.vm

# Finds the agent and all other processes with more privileges than code.
FIND_GUARDIANS = """
import os
def command(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read().split("\\0")
    except OSError:
        return []
def owner(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
guardians = [pid for pid in pids if pid == 1 or (owner(pid) == 0 and command(pid) != [""])]
assert any("guest.agent" in command(pid) for pid in guardians)
def attempt(action):
    try:
        return f"did it: {action()}"
    except OSError as error:
        return type(error).__name__
def read(path):
    with open(path, "rb") as file:
        return file.read(10)
"""
OUT_OF_REACH = ("PermissionError", "FileNotFoundError")  # a machine's kernel may not have the file at all


@pytest.fixture
def agent_is_root(machines: Machines) -> None:
    if machines.host.driver.capabilities.isolation is Isolation.NAMESPACE:
        pytest.skip("the agent is the same user as the code: see test_hostile_twin.py")


async def test_code_runs_as_an_ordinary_user_without_capabilities(shared: Clone):
    shown = (await shared.run("print(open('/proc/self/status').read())")).out
    status = dict(line.split(":\t", 1) for line in shown.splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["1000"] * 4
    assert status["Gid"].split() == ["1000"] * 4
    assert status["Groups"].split() in ([], ["1000"])
    capabilities = {kind: int(held, 16) for kind, held in status.items() if kind.startswith("Cap")}
    assert {"CapInh", "CapPrm", "CapEff", "CapBnd"} <= capabilities.keys()
    assert set(capabilities.values()) == {0}


async def test_code_cannot_become_root(shared: Clone):
    ran = await shared.run(
        FIND_GUARDIANS
        + "import json\n"
        + "tries = (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]))\n"
        + "print(json.dumps([attempt(each) for each in tries]))"
    )
    assert set(json.loads(ran.out)) <= {"PermissionError", "OSError"}  # the latter where there is no such user


async def test_no_program_gives_code_more_privileges(shared: Clone):
    """No program is setuid or setgid, and it would have no effect."""
    ran = await shared.run(
        "import ctypes, os, stat\n"
        "files = [os.path.join(place, name) for place in ('/usr/bin', '/usr/sbin') for name in os.listdir(place)]\n"
        "print([file for file in files if os.path.exists(file) and os.stat(file).st_mode & 0o6000], len(files) > 100)\n"
        "PR_GET_NO_NEW_PRIVS = 39\n"
        "print(ctypes.CDLL(None).prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))"
    )
    assert ran.out.splitlines() == ["[] True", "1"]


async def test_code_cannot_raise_its_limits(shared: Clone):
    ran = await shared.run(
        "import resource\n"
        "kinds = {name: getattr(resource, name) for name in dir(resource) if name.startswith('RLIMIT_')}\n"
        "limited = {name for name, kind in kinds.items() if resource.getrlimit(kind)[1] != resource.RLIM_INFINITY}\n"
        "raised = []\n"
        "for name in limited:\n"
        "    soft, hard = resource.getrlimit(kinds[name])\n"
        "    try:\n        resource.setrlimit(kinds[name], (soft, hard + 1))\n        raised.append(name)\n"
        "    except (ValueError, OSError):\n        pass\n"
        "try:\n"
        "    with open('/proc/self/oom_score_adj', 'w') as file: file.write('-999')\n"
        "    raised.append('oom_score_adj')\n"
        "except OSError:\n    pass\n"
        "print(raised, {'RLIMIT_NPROC', 'RLIMIT_NOFILE'} <= limited)"
    )
    assert ran.out == "[] True"


async def test_code_cannot_signal_the_agent(shared: Clone, agent_is_root: None):
    ran = await shared.run(
        FIND_GUARDIANS + "import signal\nprint({attempt(lambda: os.kill(pid, signal.SIGKILL)) for pid in guardians})"
    )
    assert ran.out == "{'PermissionError'}"
    assert (await shared.run("print('agent alive')")).out == "agent alive"


async def test_killing_every_process_it_can_ends_only_the_code_itself(clone: Clone):
    ran = await clone.run(
        "import contextlib, os, signal\n"
        "with contextlib.suppress(ProcessLookupError):  # there may be nothing but the agent\n"
        "    os.kill(-1, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert (ran.end.status, ran.end.signal, ran.end.state) == ("killed", "SIGKILL", "lost")
    assert (await clone.run("print('goes on')")).out == "goes on"


@pytest.mark.parametrize("file", ["mem", "root", "cwd", "exe", "syscall", "stack", "task/{pid}/mem"])
async def test_code_cannot_inspect_the_agent(shared: Clone, file: str):
    action = "os.readlink" if file in ("root", "cwd", "exe") else "read"
    ran = await shared.run(
        FIND_GUARDIANS
        + f"print(*{{attempt(lambda: {action}(f'/proc/{{pid}}/' + {file!r}.format(pid=pid))) for pid in guardians}})"
    )
    assert set(ran.out.split()) <= set(OUT_OF_REACH), ran.out


@pytest.mark.parametrize("file", ["environ", "maps", "fd"])
async def test_code_learns_nothing_about_the_agent_but_what_gvisor_shows_to_all_users(
    machines: Machines, shared: Clone, file: str
):
    """gVisor shows these files to all users. They are the same in every machine and give no access to the channel."""
    action = "os.listdir" if file == "fd" else "read"
    ran = await shared.run(
        FIND_GUARDIANS + f"print(*{{attempt(lambda: {action}(f'/proc/{{pid}}/{file}')) for pid in guardians}})"
    )
    if machines.host.driver.name != "gvisor":
        assert ran.out == "PermissionError"
    elif file == "environ":
        ran = await shared.run("print(*(line.split('=')[0] for line in open('/proc/1/environ').read().split('\\0')))")
        assert set(ran.out.split()) == {"HOME", "LANG", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}


async def test_code_cannot_open_the_agents_channel(shared: Clone):
    """In gVisor code can open the pipes of its own output, which belong to it, and nothing else without a path."""
    ran = await shared.run(
        FIND_GUARDIANS
        + "opened = []\n"
        + "for pid in guardians:\n"
        + "    for number in range(64):\n"
        + "        for way in (os.O_RDONLY, os.O_WRONLY):\n"
        + "            try:\n"
        + "                file = os.open(f'/proc/{pid}/fd/{number}', way | os.O_NONBLOCK)\n"
        + "                if os.fstat(file).st_uid != os.getuid():\n"
        + "                    opened.append(os.readlink(f'/proc/self/fd/{file}'))\n"
        + "                os.close(file)\n"
        + "            except OSError:\n                pass\n"
        + "print(sorted({path for path in opened if not path.startswith('/')}))"
    )
    assert ran.out == "[]"


async def test_code_cannot_trace_the_agent(shared: Clone):
    ran = await shared.run(
        FIND_GUARDIANS
        + "import ctypes\n"
        + "libc = ctypes.CDLL(None, use_errno=True)\n"
        + "ATTACH, SEIZE = 16, 0x4206\n"
        + "print({libc.ptrace(how, pid, 0, 0) for pid in guardians for how in (ATTACH, SEIZE)})\n"
        + "buffer = ctypes.create_string_buffer(8)\n"
        + "class Part(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        + "here = Part(ctypes.cast(buffer, ctypes.c_void_p), 8)\n"
        + "print({libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0) for pid in guardians})"
    )
    assert ran.out.split() == ["{-1}", "{-1}"]


async def tried_to_write(clone: Clone, path: str) -> str:
    ran = await clone.run(
        "import os\n"
        "try:\n"
        f"    os.close(os.open({path!r}, os.O_WRONLY | os.O_CREAT))\n"
        "    print('wrote')\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)"
    )
    return ran.out


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/hosts", "/etc/new", "/usr/bin/python3", "/new", "/root/new", "/dev/new"),
        *("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/sys/power/state"),
        *("/dev/vda", "/dev/vdb", "/dev/mem", "/dev/kmsg", "/dev/hwrng", "/dev/vport0p1"),
    ],
)
async def test_code_cannot_write_what_belongs_to_the_machine(shared: Clone, path: str):
    assert await tried_to_write(shared, path) in ("PermissionError", "OSError", "FileNotFoundError")


@pytest.mark.parametrize("name", ["guest/agent/__main__.py", "new", "hostname", "machine-id", "pid1"])
async def test_code_cannot_write_what_belongs_to_the_agent(shared: Clone, agent_is_root: None, name: str):
    assert await tried_to_write(shared, f"/run/mcp-sandbox/{name}") == "PermissionError"


# In every machine; gVisor's fuse and tun are its own and have no effect outside.
HARMLESS = "full fuse net/tun null ptmx pts/ptmx random stderr stdin stdout tty urandom zero"


async def test_code_can_open_only_harmless_devices(shared: Clone):
    ran = await shared.run(
        "import os\n"
        "opened, tried = [], ['/proc/kcore', '/proc/kmsg']\n"
        "tried += [os.path.join(place, name) for place, _, names in os.walk('/dev') for name in names]\n"
        "for path in tried:\n"
        "    try:\n"
        "        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))\n"
        "        opened.append(path.removeprefix('/dev/'))\n"
        "    except OSError:\n        pass\n"
        f"print(sorted(set(opened) - set({HARMLESS!r}.split())), 'null' in opened)"
    )
    assert ran.out == "[] True"


async def test_code_can_neither_mount_nor_load_modules_nor_set_the_clock(shared: Clone):
    ran = await shared.run(
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "INIT_MODULE, KEXEC_LOAD = 175, 246\n"
        "answers = [libc.mount(b'none', b'/workspace', b'tmpfs', 0, None), libc.umount2(b'/proc', 2),\n"
        "    libc.chroot(b'/workspace'), libc.sethostname(b'evil', 4), libc.syscall(INIT_MODULE, None, 0, b''),\n"
        "    libc.syscall(KEXEC_LOAD, 0, 0, None, 0), libc.iopl(3), libc.swapoff(b'/dev/vdb')]\n"
        "try:\n    time.clock_settime(time.CLOCK_REALTIME, 0)\n"
        "except PermissionError:\n    answers.append(-1)\n"
        "print(set(answers), len(answers))"
    )
    assert ran.out == "{-1} 9"


async def test_links_give_file_requests_no_more_access_than_code_has(clone: Clone, agent_is_root: None):
    """The agent is root, but reads and writes files with the privileges of code."""
    await clone.run(
        "import os\n"
        "os.symlink('/proc/kcore', '/tmp/outputs/memory.txt')\n"
        "os.symlink('/run/mcp-sandbox', '/workspace/agent')\n"
        "os.symlink('/etc', '/workspace/etc')"
    )
    for path in ("/tmp/outputs/memory.txt", "/proc/kcore"):
        with pytest.raises(RequestRefused) as refusal:
            await clone.agent.read(path, limit=100)
        assert refusal.value.code in ("denied", "not_found")
    for path in ("/workspace/etc/evil", "/workspace/agent/evil", "/workspace/agent/guest/agent/__main__.py"):
        with pytest.raises(RequestRefused) as refusal:
            await clone.agent.write(path, b"x")
        assert refusal.value.code == "denied"


async def test_a_link_in_place_of_a_spill_file_is_not_followed(clone: Clone):
    await clone.run("import os\nfor n in range(2, 4): os.symlink('/etc/hostname', f'/tmp/outputs/run-{n}-stdout.txt')")
    for _ in range(2):
        await clone.run("for n in range(9000): print('spill', n)")
    assert (await clone.run("print(open('/etc/hostname').read())")).out == clone.machine.id


async def test_replacing_the_outputs_directory_by_a_link_gives_no_access(clone: Clone):
    await clone.run("import os, shutil\nshutil.rmtree('/tmp/outputs')\nos.symlink('/etc', '/tmp/outputs')")
    ran = await clone.run("for n in range(9000): print('spill', n)")
    assert ran.end.status == "ok"
    assert ran.stdout.spill is None
    assert not ran.end.output.spill_complete
    assert "run-2-stdout.txt" not in (await clone.run("print(os.listdir('/etc'))")).out


# Forks endlessly into new sessions and ignores interrupts.
FORK_BOMB = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        if not os.fork(): os.setsid()
    except OSError: pass
"""
COUNT_BOMBS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -cx 'bomb[.]py'; true"


async def test_a_fork_bomb_ends_with_its_command_when_that_is_stopped(clone: Clone):
    await clone.agent.write("/workspace/bomb.py", FORK_BOMB.encode())
    ran = await clone.command("echo on; python3 bomb.py", stop_after_s=2)
    assert ran.end.status == "interrupted"
    assert (await clone.command(COUNT_BOMBS)).out == "0"


async def test_a_fork_bomb_left_behind_ends_when_the_next_command_needs_room(clone: Clone):
    await clone.agent.write("/workspace/bomb.py", FORK_BOMB.encode())
    full = "set -- /proc/[0-9]*; [ $# -gt 150 ]"  # without a process, for which there is no room
    await clone.command(f"python3 bomb.py & until {full}; do :; done")
    ran = await clone.command("/bin/echo runs")
    assert ran.out == "runs"
    assert "full of processes" in ran.stderr.head
    assert (await clone.command(COUNT_BOMBS)).out == "0"


async def test_code_cannot_make_a_run_or_a_listing_long(clone: Clone):
    """The deepest paths and the most files that Linux allows."""
    ran = await clone.run(
        "import os\n"
        "os.chdir('/tmp/outputs')\n"
        "for name in range(600): open(f'{name:03}' + 'n' * 200, 'w').close()\n"
        "while len(os.getcwd()) < 3800:\n"
        "    os.mkdir('d' * 200); os.chdir('d' * 200); open('f' * 60, 'w').close()"
    )
    assert ran.end.status == "ok"
    assert not ran.end.artifacts_complete
    seen, truncated = 0, True
    while truncated:
        page = await clone.agent.list("/tmp/outputs", recursive=True, max_entries=10_000, skip=seen)
        assert sum(len(entry.path) for entry in page.entries) <= MAX_LISTING
        assert page.entries
        seen, truncated = seen + len(page.entries), page.truncated
    assert seen > 600
