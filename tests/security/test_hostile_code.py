"""What code in a sandbox can do to its own machine: little, and nothing to what watches over it."""

import pytest

from guest.errors import RequestRefused
from tests.functional.machines import Clone

pytestmark = pytest.mark.vm

FIND_AGENT = """
import os
def processes(word):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = open(f"/proc/{name}/cmdline").read().split("\\0")
                uid = os.stat(f"/proc/{name}").st_uid
            except OSError:
                continue
            if word in line and uid == 0:
                found.append(int(name))
    return found
agents, zygotes = processes("guest.agent"), processes("guest.agent.zygote")
assert agents and zygotes
guardians = [1, *agents, *zygotes]
def attempt(action):
    try:
        return f"did it: {action()}"
    except OSError as error:
        return type(error).__name__
"""


async def test_code_runs_as_an_ordinary_user_without_capabilities(shared: Clone):
    shown = (await shared.run("print(open('/proc/self/status').read())")).out
    status = dict(line.split(":\t", 1) for line in shown.splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["1000"] * 4
    assert status["Gid"].split() == ["1000"] * 4
    assert status["Groups"].split() in ([], ["1000"])
    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[kind], 16) == 0, kind


async def test_code_cannot_become_root(shared: Clone):
    ran = await shared.run(
        FIND_AGENT
        + "print([attempt(lambda: os.setuid(0)), attempt(lambda: os.setgid(0)), attempt(lambda: os.setgroups([0]))])"
    )
    assert ran.out == "['PermissionError', 'PermissionError', 'PermissionError']"


async def test_code_cannot_signal_the_agent(shared: Clone):
    ran = await shared.run(
        FIND_AGENT + "import signal\nprint({attempt(lambda: os.kill(pid, signal.SIGKILL)) for pid in guardians})"
    )
    assert ran.out == "{'PermissionError'}"
    assert (await shared.run("print('agent alive')")).out == "agent alive"


async def test_killing_all_it_may_kill_ends_only_the_code_itself(clone: Clone):
    ran = await clone.run("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (ran.end.status, ran.end.signal, ran.end.state) == ("killed", "SIGKILL", "lost")
    assert (await clone.run("print('goes on')")).out == "goes on"


@pytest.mark.parametrize("file", ["mem", "environ", "maps", "fd", "root", "cwd", "exe", "syscall", "stack"])
async def test_code_cannot_look_into_the_agent(shared: Clone, file: str):
    look = {"fd": "os.listdir", "root": "os.readlink", "cwd": "os.readlink", "exe": "os.readlink"}
    action = look.get(file, "open_and_read")
    ran = await shared.run(
        FIND_AGENT
        + "def open_and_read(path):\n    with open(path, 'rb') as file: return file.read(10)\n"
        + f"print({{attempt(lambda: {action}(f'/proc/{{pid}}/{file}')) for pid in guardians}})"
    )
    assert ran.out == "{'PermissionError'}"


async def test_code_cannot_trace_the_agent(shared: Clone):
    ran = await shared.run(
        FIND_AGENT
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


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/hosts", "/etc/new", "/run/mcp-sandbox/guest/agent/__main__.py", "/run/mcp-sandbox/new"),
        *("/run/mcp-sandbox/hostname", "/run/mcp-sandbox/machine-id", "/run/mcp-sandbox/pid1", "/usr/bin/python3"),
        *("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/sys/power/state", "/new", "/root/new", "/dev/new"),
        *("/dev/vda", "/dev/vdb", "/dev/mem", "/dev/kmsg", "/dev/hwrng", "/dev/vport0p1"),
    ],
)
async def test_code_cannot_write_what_belongs_to_the_machine(shared: Clone, path: str):
    ran = await shared.run(
        "import os\n"
        "try:\n"
        f"    os.close(os.open({path!r}, os.O_WRONLY | os.O_CREAT))\n"
        "    print('wrote')\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)"
    )
    assert ran.out in ("PermissionError", "OSError", "FileNotFoundError")


async def test_code_cannot_read_the_disks_or_the_agents_channel(shared: Clone):
    ran = await shared.run(
        "import glob\n"
        "opened, tried = [], [*glob.glob('/dev/vd*'), *glob.glob('/dev/vport*'), '/dev/mem', '/proc/kcore']\n"
        "for path in tried:\n"
        "    try:\n        open(path, 'rb').close()\n        opened.append(path)\n"
        "    except OSError:\n        pass\n"
        "print(opened, len(tried))"
    )
    assert ran.out == "[] 5"


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


async def test_links_in_the_outputs_directory_lead_the_agent_nowhere(clone: Clone):
    """The agent has root's rights; what it reads and writes for the host it does with those of the code."""
    await clone.run(
        "import os, shutil\n"
        "os.symlink('/root/.profile', '/tmp/outputs/profile.txt')\n"
        "os.symlink('/etc/hostname', '/tmp/outputs/run-3-stdout.txt')\n"
        "os.symlink('/etc', '/workspace/etc')"
    )
    for path in ("/tmp/outputs/profile.txt", "/root/.profile"):
        with pytest.raises(RequestRefused) as refusal:
            await clone.agent.read(path, limit=100)
        assert refusal.value.code in ("denied", "not_a_file")
    with pytest.raises(RequestRefused) as refusal:
        await clone.agent.write("/workspace/etc/evil", b"x")
    assert refusal.value.code == "denied"
    for _ in range(2):
        await clone.run("for n in range(9000): print('spill', n)")
    assert (await clone.run("print(open('/etc/hostname').read())")).out == clone.machine.id


async def test_replacing_the_outputs_directory_by_a_link_does_not_help(clone: Clone):
    await clone.run("import os, shutil\nshutil.rmtree('/tmp/outputs')\nos.symlink('/etc', '/tmp/outputs')")
    ran = await clone.run("for n in range(9000): print('spill', n)")
    assert ran.end.status == "ok"
    assert ran.stdout.spill is None
    assert not ran.end.output.spill_complete
    assert "run-2-stdout.txt" not in (await clone.run("print(os.listdir('/etc'))")).out
