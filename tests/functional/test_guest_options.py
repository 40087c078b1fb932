"""The agent's options for machines that are not virtual: --one-kernel, --memory-mb, --own-pids."""

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Identity, Output, RunCode, WarmUp
from tests.functional.guest_harness import SEPARATE_USER, agent_client, command, run
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio

LIMIT_S = HANG_S

# Lists the machine's processes by the module or program that each runs.
PROCESSES = """import os
def programs():
    found = []
    for pid in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
        try: words = open(f'/proc/{pid}/cmdline').read().split('\\0')
        except FileNotFoundError: continue  # the parent that forked this kernel has just exited
        zygote = any('guest.agent.python_check' in word for word in words)
        found.append('zygote' if zygote else 'agent' if 'guest.agent' in words else words[0])
    return found
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def names(client: AgentClient) -> list[str]:
    shown = (await run(client, f"{PROCESSES}\n' '.join(programs())")).shown[0]
    return shown.strip("'").split()


# ---------------------------------------------------------------- one kernel


async def test_with_one_kernel_there_is_no_second_warm_process():
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import xml.dom", "--one-kernel") as client:
            assert (await names(client)).count("zygote") == 1  # it became the kernel
            assert (await run(client, "import sys; 'xml.dom' in sys.modules")).shown == ["True"]


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "signal"),
    [
        ("os._exit(3)", "exited", 3, None),
        ("os.kill(os.getpid(), 9)", "killed", None, "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed", None, "SIGSEGV"),
    ],
)
async def test_the_only_kernel_is_replaced_by_a_warm_one(code, status, exit_code, signal):
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import xml.dom", "--one-kernel") as client:
            await run(client, "x = 1")
            finished = (await run(client, f"import os; {code}")).finished
            assert (finished.status, finished.exit_code, finished.signal) == (status, exit_code, signal)
            assert finished.state == "lost"
            after = await run(client, "import sys; 'xml.dom' in sys.modules, 'x' in globals()")
            assert after.shown == ["(True, False)"]
            assert (await names(client)).count("zygote") == 1


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_the_only_kernel_is_killed_with_everything_it_started():
    code = """import os, signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(['sleep', '4242'], start_new_session=True)
print('on')
while True: pass"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", "--one-kernel") as client:
            async with client.run(RunCode(code, grace_s=0.1)) as events:
                assert await anext(events) == Output("stdout", "on\n")
                await events.stop()
                finished = await events.wait_finished()
            assert (finished.status, finished.state, finished.signal) == ("killed", "lost", "SIGKILL")
            assert "sleep" not in await names(client)


async def test_a_run_stopped_while_it_waits_for_a_kernel_ends_at_once():
    slow = "import os, time\nwhile os.path.exists('/workspace/wait'): time.sleep(0.01)"
    with anyio.fail_after(LIMIT_S):
        async with agent_client(slow, "--one-kernel") as client:
            await client.write("wait", b"")
            await run(client, "import os; os._exit(0)")
            async with client.run(RunCode("open('ran', 'w').close()")) as events:
                await events.stop()
                finished = await events.wait_finished()
            assert (finished.status, finished.state) == ("interrupted", "kept")
            await command(client, "rm wait")
            assert (await run(client, "import os; os.path.exists('ran')")).shown == ["False"]


# ---------------------------------------------------------------- orphans


@pytest.mark.parametrize("options", [(), ("--one-kernel",)])
async def test_orphans_leave_no_zombies(options):
    orphans = """import os
for _ in range(20):
    if not os.fork():
        os.fork()
        os._exit(0)
    os.wait()
"""
    zombies = """def state(pid):
    try:
        return open(f'/proc/{pid}/stat').read().rsplit(')')[1].split()[0]
    except OSError:  # it has ended
        return None
while 'Z' in [state(pid) for pid in os.listdir('/proc') if pid.isdigit()]: pass"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", *options) as client:
            await run(client, orphans)
            assert (await run(client, zombies)).finished.status == "ok"


# ---------------------------------------------------------------- limits and privileges


async def test_a_memory_bomb_is_ended_and_threads_and_libraries_work():
    work = """import numpy, pandas, threading
frame = pandas.DataFrame(numpy.random.rand(100_000, 10))
product = frame.to_numpy().T @ frame.to_numpy()
threads = [threading.Thread(target=frame.sum) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
product.shape"""
    bomb = "hoard = []\nwhile True: hoard.append(bytearray(10_000_000))"
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import numpy, pandas", "--memory-mb", "512") as client:
            assert (await run(client, work)).shown == ["(10, 10)"]
            finished = (await run(client, bomb)).finished
            assert finished.error is not None
            assert (finished.error.name, finished.state) == ("MemoryLimitExceeded", "lost")
            assert "more than its 512 MB" in finished.error.message
            absurd = (await run(client, "kept = 1\nimport numpy\nnumpy.zeros(10**11)")).finished
            assert absurd.error is not None
            assert (absurd.error.name, absurd.state) == ("MemoryError", "kept")


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
@pytest.mark.parametrize("options", [(), ("--one-kernel",)])
async def test_no_thread_of_code_can_gain_privileges(options):
    look = r"""import glob
status = [dict(line.split(':\t', 1) for line in open(path).read().splitlines() if ':\t' in line)
    for path in glob.glob('/proc/self/task/*/status')]
print({(s['NoNewPrivs'], s['CapEff'], s['CapPrm'], s['Uid'].split()[0]) for s in status}, status[0]['CapBnd'])"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import numpy; numpy.ones((500, 500)) @ numpy.ones((500, 500))", *options) as client:
            none = "0" * 16
            assert (await run(client, look)).stdout == f"{{('1', '{none}', '{none}', '1000')}} {none}\n"


# The harness has changed its root directory: there Linux allows no user namespaces, and answers after any filter.
SETNS = (
    "import ctypes, errno; ctypes.CDLL(None, use_errno=True).setns(-1, 0); print(errno.errorcode[ctypes.get_errno()])"
)


@pytest.mark.parametrize(("allowed", "answer"), [(False, "EPERM\n"), (True, "EBADF\n")])
async def test_a_template_decides_whether_code_may_use_namespaces(allowed, answer):
    with anyio.fail_after(LIMIT_S):
        async with agent_client(WarmUp(user_namespaces=allowed)) as client:
            await client.write("setns.py", SETNS.encode())
            assert (await run(client, SETNS)).stdout == answer
            assert (await command(client, "python3 setns.py")).stdout == answer


async def test_code_is_filtered_in_a_machine_that_was_never_warmed_up():
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            await client.write("setns.py", SETNS.encode())
            assert (await command(client, "python3 setns.py")).stdout == "EPERM\n"


# ---------------------------------------------------------------- agent and code are one unprivileged user


async def test_a_sweep_ends_all_but_the_agent_its_zygote_and_process_1():
    leave = """import os, subprocess
for _ in range(5): subprocess.Popen(['sleep', '4242'], start_new_session=True)
os._exit(1)"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", "--own-pids", user="none") as client:
            before = set(await names(client))  # not how many: the process that forks a kernel takes a moment to leave
            await run(client, leave)
            assert set(await names(client)) == before


async def test_a_fork_bomb_of_the_agents_own_user_is_swept():
    code = """import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
refused = 0
for _ in range(1000):
    try: os.fork() or (os.setsid(), signal.pause())
    except OSError: refused += 1
print(refused > 500)
while True:
    try: os.kill(os.fork() or os.getpid(), 9)
    except OSError: pass"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", "--own-pids", "--one-kernel", user="none") as client:
            async with client.run(RunCode(code, grace_s=0.1)) as events:
                assert await anext(events) == Output("stdout", "True\n")
                await events.stop()
                finished = await events.wait_finished()
            assert (finished.status, finished.state, finished.signal) == ("killed", "lost", "SIGKILL")
            assert (await names(client)).count("zygote") == 1
            many = "for pid in [os.fork() or os._exit(0) for _ in range(100)]: os.waitpid(pid, 0)"
            assert (await run(client, f"import os\n{many}")).finished.status == "ok"


async def test_code_cannot_read_the_memory_of_an_agent_of_the_same_user():
    look = """import os
def opens(path):
    try: open(path, 'rb').close()
    except PermissionError: return False
    return True
guardians = [pid for pid in os.listdir('/proc') if pid.isdigit() and pid != str(os.getpid())
    and any(word == 'guest.agent' or 'guest.agent.python_check' in word
            for word in open(f'/proc/{pid}/cmdline').read().split('\\0'))]
len(guardians), {opens(f'/proc/{pid}/mem') for pid in guardians}, opens('/proc/self/mem')"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", "--own-pids", user="none") as client:
            assert (await run(client, look)).shown == ["(2, {False}, True)"]


async def test_a_machine_that_cannot_set_its_hostname_still_writes_the_files():
    with anyio.fail_after(LIMIT_S):
        async with agent_client("", "--own-pids", user="none") as client:
            refreshed = await client.refresh(Identity("clone-7", "ab" * 16, b"e" * 64))
            assert not refreshed.hostname_set
            assert (await client.read("/etc/hostname", limit=100)).data == b"clone-7\n"
            assert (await client.read("/etc/machine-id", limit=100)).data == b"ab" * 16 + b"\n"


async def test_code_that_kills_its_zygote_and_itself_gets_a_new_kernel():
    kill = """import os
for pid in os.listdir('/proc'):
    if pid.isdigit() and 'guest.agent.python_check' in open(f'/proc/{pid}/cmdline').read() and int(pid) != os.getpid():
        os.kill(int(pid), 9)
        print('killed')
os.kill(os.getpid(), 9)"""
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import xml.dom", "--own-pids", user="none") as client:
            killed = await run(client, kill)
            assert (killed.stdout, killed.finished.state) == ("killed\n", "lost")
            assert (await run(client, "import sys; 'xml.dom' in sys.modules")).shown == ["True"]
