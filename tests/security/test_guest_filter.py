"""Which system calls the guest's seccomp filter refuses to all code of a machine, and what still works with it."""

import errno
import json
import platform

import pytest

from guest.seccomp import ARCHITECTURES, CLONE, CLONE3, KERNEL_PARTS, MOUNTS_AND_NAMESPACES, UNSHARE
from tests.functional.machines import Clone

pytestmark = pytest.mark.vm

COLUMN = ARCHITECTURES[platform.machine()].column
NAMESPACES = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
EXIT_SIGNAL = 17
REFUSALS = {
    **{name: (numbers[COLUMN], 0) for name, numbers in {**KERNEL_PARTS, **MOUNTS_AND_NAMESPACES}.items()},
    **{f"unshare {flag:#x}": (UNSHARE[COLUMN], flag) for flag in NAMESPACES},
    **{f"clone {flag:#x}": (CLONE[COLUMN], flag | EXIT_SIGNAL) for flag in NAMESPACES},
}
# Prints the error of each call; 0 if it succeeds.
CALLS = f"""
import ctypes, json
kernel = ctypes.CDLL(None, use_errno=True)
def call(number, argument):
    words = [ctypes.c_ulong(argument)] + [ctypes.c_ulong(0)] * 5
    return ctypes.get_errno() if kernel.syscall(ctypes.c_long(number), *words) == -1 else 0
def look():
    return {{name: call(*one) for name, one in {REFUSALS}.items()}}, call({CLONE3[COLUMN]}, 0)
"""


def assert_refused(shown: str) -> None:
    found, clone3 = json.loads(shown)
    assert found == dict.fromkeys(REFUSALS, errno.EPERM)
    assert clone3 == errno.ENOSYS


@pytest.mark.rights
async def test_code_gets_neither_namespaces_nor_dangerous_parts_of_the_kernel(shared: Clone):
    assert_refused((await shared.run(f"{CALLS}\nprint(json.dumps(look()))")).out)


async def test_no_thread_of_the_kernel_is_without_the_filter(shared: Clone):
    """Libraries have started threads before any code ran, and code can make them run anything."""
    ran = await shared.run(
        "import glob\n"
        "import numpy; numpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
        "status = [open(path).read() for path in glob.glob('/proc/self/task/*/status')]\n"
        "print({line.split()[1] for text in status for line in text.splitlines() if line.startswith('Seccomp:')})"
    )
    assert ran.out == "{'2'}"


@pytest.mark.rights
async def test_commands_are_filtered_like_code(shared: Clone):
    await shared.agent.write("/workspace/calls.py", f"{CALLS}\nprint(json.dumps(look()))".encode())
    assert_refused((await shared.command("python3 calls.py")).out)


async def test_a_new_kernel_is_filtered_like_the_first(clone: Clone):
    assert (await clone.run("import os; os._exit(1)")).end.state == "lost"
    assert_refused((await clone.run(f"{CALLS}\nprint(json.dumps(look()))")).out)


async def test_a_call_of_another_architecture_ends_its_process(shared: Clone):
    x32 = "import ctypes; ctypes.CDLL(None).syscall(ctypes.c_long(0x4000_0000 + 39))"
    ran = await shared.run(f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {x32!r}]).returncode)")
    assert ran.out in ("-31", "-9")  # SIGSYS; some kernels say SIGKILL


WORKING = {
    "threads": "import threading\nt = threading.Thread(target=print, args=('works',)); t.start(); t.join()",
    "subprocesses": "import subprocess\nprint(subprocess.check_output(['echo', 'works'], text=True))",
    "a pool of processes": (
        "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(*pool.map(str.strip, [' works']))"
    ),
    "processes that are spawned": (
        "from concurrent.futures import ProcessPoolExecutor\nimport multiprocessing\n"
        "with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:\n"
        "    print(pool.submit(str, 'works').result())"
    ),
    "pandas": "import pandas as pd\nprint(pd.DataFrame({'a': ['works']}).a.sum())",
    "matplotlib": (
        "import matplotlib.pyplot as plt\nplt.plot([1]); plt.savefig('/tmp/f.png'); plt.close(); print('works')"
    ),
    "event loops": (
        "import asyncio\n"
        "async def main():\n"
        "    child = await asyncio.create_subprocess_shell('echo works', stdout=-1)\n"
        "    print((await child.communicate())[0].decode())\n"
        "asyncio.run(main())"
    ),
}


@pytest.mark.parametrize("code", WORKING.values(), ids=WORKING)
async def test_ordinary_programs_still_work(shared: Clone, code: str):
    assert (await shared.run(code)).out == "works"
