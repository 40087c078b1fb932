"""Running code through a real agent, zygote and Python kernel."""

from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, Identity, Output, RunCode, WarmUp
from guest.errors import RequestRefused
from tests.functional.guest_harness import SEPARATE_USER, Result, agent_client, command, run
from tests.waiting import HANG_S

LIMIT_S = HANG_S


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    async with agent_client("import numpy, pandas") as client:
        yield client


@pytest.fixture(autouse=True)
async def limit(machine: AgentClient) -> AsyncIterator[None]:
    """Fail tests that hang, and clear the kernel's namespace before each."""
    with anyio.fail_after(LIMIT_S):
        await run(machine, "%reset -f")
        yield


async def test_state_is_kept_between_runs(machine):
    await run(machine, "x = 20")
    result = await run(machine, "x + 1")
    assert result.shown == ["21"]
    assert (result.finished.status, result.finished.state, result.finished.exit_code) == ("ok", "kept", 0)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", ["2"]),
        ("1 + 1;", []),
        ("1 + 1  # two; really", ["2"]),
        ("1 + 1;  # hushed", []),
        ("None", []),
        ("x = 5", []),
        ("x = 5\nx", ["5"]),
        ("'a'\n'b'", ["'b'"]),
        ("", []),
        ("# nothing", []),
        ("[1.5, 'a', None]", ["[1.5, 'a', None]"]),
        ("if True:\n    3", []),
        ("display(1); display('a')", ["1", "'a'"]),
        ("True", ["True"]),
        ("1 + 1\n_ * 10", ["20"]),
    ],
)
async def test_the_last_expression_is_shown(machine, code, shown):
    if "_" in code:
        await run(machine, "2")
    assert (await run(machine, code)).shown == shown


async def test_a_data_frame_comes_as_text_and_html(machine):
    result = await run(machine, "import pandas as pd\npd.DataFrame({'a': [1, 2]})")
    (display,) = result.displays
    assert display.data["text/plain"] == "   a\n0  1\n1  2"
    assert "<table" in display.data["text/html"]


async def test_a_huge_value_is_cut_with_a_note(machine):
    result = await run(machine, "from IPython.display import HTML\ndisplay(HTML('x' * 300_000)); list(range(100_000))")
    assert "text/html" not in result.displays[0].data
    assert len(result.shown[1]) < 100_000
    result = await run(machine, "'x' * 300_000")
    assert "characters left out" in result.shown[0]


async def test_displays_beyond_the_limit_are_counted(machine):
    result = await run(machine, "for i in range(100): display('x' * 100)", max_display_bytes=1000)
    assert result.finished.output.displays_dropped == 100 - len(result.displays)
    assert 0 < len(result.displays) < 10


async def test_images_are_shown_after_the_display_limit_is_reached(machine):
    code = """for i in range(3000): display('x' * 100)
for i in range(200): display({'image/svg+xml': '<svg/>'}, raw=True)
display({'image/svg+xml': '<svg/>', 'text/plain': 'x' * 1000}, raw=True)"""
    result = await run(machine, code)
    assert result.finished.status == "ok"
    assert sum(len(display.files) for display in result.displays) == 201
    assert result.finished.output.displays_dropped == 3000 - (len(result.displays) - 201) + 1
    await run(machine, "!rm /tmp/outputs/*.svg")


@pytest.mark.parametrize(
    "code",
    [
        "plt.plot([1, 2])\nplt.show()",
        "plt.plot([1, 2]);",
        "fig, ax = plt.subplots(); ax.plot([1, 2]); None",
        "import matplotlib; matplotlib.use('Agg'); plt.figure(); plt.plot([1, 2]); None",
        "plt.plot([1, 2])\nraise ValueError",
    ],
)
async def test_every_figure_becomes_a_png_without_being_saved(machine, code):
    result = await run(machine, f"import matplotlib.pyplot as plt\n{code}")
    (path,) = [path for display in result.displays for path in display.files]
    assert path.startswith("/tmp/outputs/figure-")
    (artifact,) = [event for event in result.events if isinstance(event, Artifact)]
    assert artifact.path == path
    data = (await machine.read(path, limit=10_000_000)).data
    assert data.startswith(b"\x89PNG")
    assert artifact.size == len(data)


async def test_figure_numbers_are_never_used_twice(machine):
    plot = "import matplotlib.pyplot as plt; plt.plot([1]); plt.figure(); None"
    first = [path for display in (await run(machine, plot)).displays for path in display.files]
    await command(machine, f"rm {first[-1]}")
    await run(machine, "import os; os._exit(1)")
    second = [path for display in (await run(machine, plot)).displays for path in display.files]
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)


async def test_code_that_plots_nothing_does_not_import_matplotlib(machine):
    await run(machine, "import os; os._exit(0)")
    assert (await run(machine, "import sys; 'matplotlib' in sys.modules")).shown == ["False"]


async def test_new_and_changed_files_are_artifacts_of_the_run_that_made_them(machine):
    write = "open('/tmp/outputs/a.csv', 'a').write('x')\nNone"
    for size in (1, 2):
        artifacts = [event for event in (await run(machine, write)).events if isinstance(event, Artifact)]
        assert artifacts == [Artifact("/tmp/outputs/a.csv", size)]
    await machine.write("/tmp/outputs/from-host.txt", b"x")
    assert not [event for event in (await run(machine, "1")).events if isinstance(event, Artifact)]


def paths(result: Result) -> list[str]:
    return [event.path for event in result.events if isinstance(event, Artifact)]


async def test_a_file_in_a_folder_of_an_earlier_run_is_an_artifact():
    with anyio.fail_after(LIMIT_S):
        async with agent_client() as client:
            assert paths(await run(client, "import os; os.mkdir('/tmp/outputs/sub')")) == []
            assert paths(await run(client, "open('/tmp/outputs/sub/a.txt', 'w').close()")) == ["/tmp/outputs/sub/a.txt"]


async def test_a_file_written_by_the_host_during_a_run_is_not_its_artifact(machine):
    code = "open('/tmp/outputs/own.txt', 'w').close()\nprint('on')\nwhile not os.path.exists('/workspace/go'): pass"
    async with machine.run(RunCode(f"import os\n{code}")) as events:
        assert await anext(events) == Output("stdout", "on\n")
        await machine.write("/tmp/outputs/hosts/written.txt", b"x")
        await machine.write("go", b"")
        assert paths(Result([event async for event in events])) == ["/tmp/outputs/own.txt"]
    await run(machine, "!rm -r /workspace/go /tmp/outputs/own.txt /tmp/outputs/hosts")


async def test_too_many_artifacts_are_reported_as_incomplete():
    with anyio.fail_after(LIMIT_S):
        async with agent_client() as client:
            assert (await run(client, "1")).finished.artifacts_complete
            result = await run(client, "for i in range(600): open(f'/tmp/outputs/{i}', 'w').close()")
            assert (len(paths(result)), result.finished.artifacts_complete) == (500, False)
            assert (await run(client, "!rm -r /tmp/outputs/*")).finished.artifacts_complete


async def test_output_streams_while_the_code_runs(machine):
    code = "import os\nprint('first')\nwhile not os.path.exists('/workspace/go'): pass\nprint('second')"
    async with machine.run(RunCode(code)) as events:
        assert await anext(events) == Output("stdout", "first\n")
        await machine.write("go", b"")
        rest = Result([event async for event in events])
    await command(machine, "rm go")
    assert rest.stdout == "second\n"


async def test_output_and_displays_keep_their_order(machine):
    result = await run(machine, "for i in range(50):\n    print(i)\n    display(i)\n'end'")
    kinds = [event.text if isinstance(event, Output) else event.data["text/plain"] for event in result.events[:-1]]  # type: ignore[union-attr]
    assert [text.strip() for text in kinds] == [str(i) for i in range(50) for _ in "ab"] + ["'end'"]


async def test_stderr_and_subprocesses_are_captured(machine):
    code = """import sys, os, subprocess
print("to err", file=sys.stderr)
os.write(1, b"raw\\n")
subprocess.run(["sh", "-c", "echo child; echo complaint >&2"])
os.system("echo system")
!echo magic
"""
    result = await run(machine, code)
    assert result.stdout.split() == ["raw", "child", "system", "magic"]
    assert result.stderr.split() == ["to", "err", "complaint"]


async def test_a_character_written_in_two_pieces_stays_whole(machine):
    code = "import os, time\nfor b in 'grün €'.encode():\n    os.write(1, bytes([b]))\n    time.sleep(0.01)"
    result = await run(machine, code)
    assert result.stdout == "grün €"
    result = await run(machine, r"import os; os.write(1, b'a\xff\xfeb'); None")
    assert result.stdout == "a\ufffd\ufffdb"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("1/0", "ZeroDivisionError", "division by zero"),
        ("def f():\n    raise KeyError('x')\nf()", "KeyError", "'x'"),
        ("def f(:", "SyntaxError", "invalid syntax"),
        ("return 1", "SyntaxError", "'return' outside function"),
        ("  x = 1\n y = 2", "IndentationError", "unexpected indent"),
        ("%nosuchmagic", "UsageError", "not found"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("raise BaseException('odd')", "BaseException", "odd"),
        ("input('name? ')", "EOFError", "no stdin was given"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E", "cannot be shown"),
        ("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", "ExceptionGroup", "two"),
    ],
)
async def test_an_exception_is_a_result_with_the_users_traceback(machine, code, name, message):
    result = await run(machine, code)
    error = result.finished.error
    assert (result.finished.status, result.finished.state) == ("error", "kept")
    assert error is not None
    assert error.name == name
    assert message in error.message
    assert name in error.traceback
    assert "\x1b" not in error.traceback
    assert "kernels/python.py" not in error.traceback


async def test_a_traceback_shows_the_line_in_the_cell(machine):
    result = await run(machine, "def f(n):\n    return 1 / n\n\nf(0)")
    error = result.finished.error
    assert error is not None
    assert "line 4, in <module>\n    f(0)" in error.traceback
    assert "line 2, in f\n    return 1 / n\n           ~~^~~" in error.traceback


async def test_the_traceback_of_an_endless_recursion_is_short(machine):
    result = await run(machine, "def f(): f()\nf()")
    error = result.finished.error
    assert error is not None
    assert error.name == "RecursionError"
    assert len(error.traceback) < 5000


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("exit", 0),
        ("exit()", 0),
        ("quit(4)", 4),
        ("raise SystemExit('bye')", 1),
    ],
)
async def test_exit_ends_the_run_and_keeps_the_state(machine, code, exit_code):
    await run(machine, "x = 1")
    result = await run(machine, code)
    assert (result.finished.status, result.finished.exit_code) == ("exited", exit_code)
    assert result.finished.state == "kept"
    assert ("bye" in result.stderr) == ("bye" in code)
    assert (await run(machine, "x")).shown == ["1"]


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "signal"),
    [
        ("os._exit(3)", "exited", 3, None),
        ("os.kill(os.getpid(), 9)", "killed", None, "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed", None, "SIGSEGV"),
        ("os.closerange(3, 1000)", None, None, None),
    ],
)
async def test_a_kernel_that_dies_is_replaced_and_its_state_is_lost(machine, code, status, exit_code, signal):
    await run(machine, "x = 1")
    result = await run(machine, f"import os\nprint('last words')\n{code}")
    assert result.stdout == "last words\n"
    assert result.finished.state == "lost"
    if status:
        finished = result.finished
        assert (finished.status, finished.exit_code, finished.signal) == (status, exit_code, signal)
    after = await run(machine, "'x' in globals()")
    assert after.shown == ["False"]


FORGE = """import os, socket, json, struct
control = next(fd for fd in range(3, 50) if os.path.exists(f'/proc/self/fd/{fd}')
               and os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'))
wire = socket.socket(fileno=os.dup(control))
run = int(get_ipython().display_pub.screen._run)
def forge(body=b'{}', **header):
    raw = json.dumps({'run': run, **header}).encode()
    wire.sendall(struct.pack('>4sII', b'MCSB', len(raw), len(body)) + raw + body)
print('ready')
"""


@pytest.mark.parametrize(
    "lie",
    [
        "forge(event='display', files=['ä' * 10_000])",
        "forge(event='display', files=['x'] * 1000)",
        "forge(event='display', files=[[[]]])",
        "forge(b'nonsense', event='display')",
        "forge(event='done', status='exited', exit_code=2**40)",
        "forge(event='done', status='error', name={}, message='ä' * 10_000)",
        "forge(event='done', figures=-10**30)",
        "forge(event='done', status='killed', signal='<b>no signal</b>')",
        "forge(event='done', status='killed', signal='SIG' + 'A' * 60_000)",
        "forge(event='done', status='killed', signal={})",
        "forge(b'nonsense', event='report')",
        "forge(b'{\"kind\": \"compiled\"}', event='report')",
        "forge(b' ' * 1_000_000, event='report')",
        "forge(event='ready'); forge(event='reseeded'); forge(event=[]); forge(event='done', run=-1)",
        "forge(event='done'); forge(event='done'); forge(event='display')",
        "wire.sendall(b'nonsense')",
        "wire.sendall(b'MCSB')",  # and no more
        "wire.sendall(struct.pack('>4sII', b'MCSB', 4, 0) + b'[[[[')",
        "wire.sendall(struct.pack('>4sII', b'MCSB', 60_000, 0) + b'[' * 60_000)",
        "wire.sendall(struct.pack('>4sII', b'MCSB', 2**32 - 1, 2**32 - 1))",
        "wire.shutdown(socket.SHUT_RDWR)",
        "wire.shutdown(socket.SHUT_WR)",
        "for _ in range(20_000): forge(event='x', wait=True)",
    ],
)
async def test_forged_kernel_messages_do_not_harm_the_machine(machine, lie):
    result = await run(machine, FORGE + lie)
    assert result.stdout == "ready\n"
    await run(machine, "import os; os._exit(0)")
    assert (await run(machine, "1 + 1")).shown == ["2"]
    plot = await run(machine, "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()")
    assert [path for display in plot.displays for path in display.files if path.startswith("/tmp/outputs/figure-")]


async def test_nonsense_on_the_kernels_socket_ends_the_kernel_with_a_note(machine):
    result = await run(machine, FORGE + "wire.sendall(b'nonsense')\nwhile True: pass")
    assert (result.finished.status, result.finished.signal, result.finished.state) == ("killed", "SIGKILL", "lost")
    assert "wrote to the socket" in result.stderr


async def test_an_interrupted_run_keeps_the_state(machine):
    await run(machine, "x = 1")
    async with machine.run(RunCode("import time; x = 2; print('on')\ntime.sleep(1000)")) as events:
        assert await anext(events) == Output("stdout", "on\n")
        await events.stop()
        result = Result([event async for event in events])
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert result.finished.error is not None
    assert result.finished.error.name == "KeyboardInterrupt"
    assert (await run(machine, "x")).shown == ["2"]


async def test_a_run_that_cannot_be_interrupted_is_killed(machine):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on')\nwhile True: pass"
    async with machine.run(RunCode(code, grace_s=0.1)) as events:
        await anext(events)
        await events.stop()
        result = Result([event async for event in events])
    finished = result.finished
    assert (finished.status, finished.state, finished.signal) == ("killed", "lost", "SIGKILL")
    assert (await run(machine, "1 + 1")).shown == ["2"]


async def test_a_signal_handler_left_behind_does_not_make_the_next_run_unstoppable(machine):
    await run(machine, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); None")
    async with machine.run(RunCode("print('on')\nwhile True: pass")) as events:
        await anext(events)
        await events.stop()
        result = Result([event async for event in events])
    assert result.finished.status == "interrupted"


async def test_a_cancelled_run_frees_its_machine(machine):
    await run(machine, "x = 1")
    with anyio.move_on_after(0.2):
        await run(machine, "while True: pass")
    assert (await run(machine, "x")).shown == ["1"]


async def test_stopping_a_run_that_has_ended_is_harmless(machine):
    async with machine.run(RunCode("1")) as events:
        await events.wait_finished()
        await events.stop()
    assert (await run(machine, "2")).shown == ["2"]


async def test_only_one_run_at_a_time(machine):
    async with machine.run(RunCode("print('on')\nwhile True: pass")) as events:
        await anext(events)
        with pytest.raises(RequestRefused) as caught:
            await run(machine, "1")
        assert caught.value.code == "busy"
        await machine.write("during.txt", b"still served")
        assert (await machine.read("during.txt", limit=100)).data == b"still served"
    assert (await run(machine, "2")).shown == ["2"]


async def test_a_fork_that_returns_from_the_code_does_not_act_as_the_kernel(machine):
    code = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('child' if pid == 0 else 'parent')\npid > 0"
    result = await run(machine, code)
    assert sorted(result.stdout.split()) == ["False", "child", "parent"]
    assert result.shown == ["True"]
    assert (await run(machine, "1 + 1")).shown == ["2"]


async def test_multiprocessing_works(machine):
    code = "from multiprocessing import Pool\ndef f(x): return x * x\nwith Pool(2) as p: r = p.map(f, [1, 2, 3])\nr"
    assert (await run(machine, code)).shown == ["[1, 4, 9]"]


async def test_a_process_left_behind_neither_blocks_nor_corrupts(machine):
    await run(machine, "import subprocess; p = subprocess.Popen(['sh', '-c', 'while :; do echo noise; done'])")
    for number in range(5):
        assert (await run(machine, f"{number}", head_bytes=1000, tail_bytes=1000)).shown == [str(number)]
    result = await run(machine, "p.kill(); p.wait()")
    assert result.finished.status == "ok"


async def test_a_thread_left_behind_neither_blocks_nor_corrupts(machine):
    code = """import threading
on = True
def chatter():
    while on: print('thread'); display('thread')
t = threading.Thread(target=chatter); t.start()"""
    await run(machine, code)
    for number in range(5):
        assert str(number) in (await run(machine, f"{number}")).shown
    result = await run(machine, "on = False; t.join()")
    assert result.finished.status == "ok"


async def test_a_flood_of_output_is_sent_as_head_and_tail_and_complete_in_a_file(machine):
    line = "x" * 99 + "\n"
    code = "import sys\nfor i in range(500): sys.stdout.write(('x' * 99 + '\\n') * 1000)\nprint('the end')"
    result = await run(machine, code, head_bytes=10_000, tail_bytes=5_000)
    total = 500 * 1000 * 100 + len("the end\n")
    output = result.finished.output
    assert result.finished.status == "ok"
    assert (output.stdout_bytes, output.stderr_bytes, output.spill_complete) == (total, 0, True)
    assert len(result.stdout) == 15_000
    assert result.stdout.startswith(line)
    assert result.stdout.endswith("the end\n")
    assert sum(event.gap_bytes for event in result.events if isinstance(event, Output)) == total - 15_000
    assert output.stdout_spill is not None
    assert not [event for event in result.events if isinstance(event, Artifact)]
    end = await machine.read(output.stdout_spill, offset=total - 8, limit=100)
    assert (end.data, end.eof, end.size) == (b"the end\n", True, total)
    await command(machine, f"rm {output.stdout_spill}")


async def test_a_spill_file_that_does_not_fit_on_the_disk_is_reported_as_incomplete(machine):
    fill = "f = open('/tmp/fill', 'wb')\ntry:\n    while True: f.write(b'x' * 1_000_000)\nexcept OSError: pass"
    await run(machine, fill)
    result = await run(machine, "for i in range(10_000): print('y' * 99)", head_bytes=1000, tail_bytes=1000)
    output = result.finished.output
    assert (result.finished.status, output.stdout_bytes, output.spill_complete) == ("ok", 1_000_000, False)
    with pytest.raises(RequestRefused) as caught:
        await machine.write("/tmp/big", b"x" * 5_000_000)
    assert caught.value.code == "no_space"
    await run(machine, "import os; os.remove('/tmp/fill')")
    assert not [
        entry for entry in (await machine.list("/tmp", recursive=False, max_entries=100)).entries if "big" in entry.path
    ]


async def test_code_and_the_processes_it_starts_read_the_stdin_given_with_it(machine):
    options = {"stdin": "one\ntwo\nthree\n"}
    assert (await run(machine, "[input(), input('? ')]", options=options)).shown == ["['one', 'two']"]
    assert (await run(machine, "import sys; sys.stdin.read()", options=options)).shown == ["'one\\ntwo\\nthree\\n'"]
    assert (await run(machine, "!wc -l", options=options)).stdout.strip() == "3"


async def test_stdin_lasts_for_one_run(machine):
    await run(machine, "input()", options={"stdin": "one\ntwo\n"})
    assert (await run(machine, "input()")).error.name == "EOFError"
    assert (await run(machine, "import sys; sys.stdin.read()")).shown == ["''"]


async def test_input_raises_eof_error_at_the_end_of_stdin(machine):
    assert (await run(machine, "input(); input()", options={"stdin": "one"})).error.name == "EOFError"


async def test_stdin_can_be_given_after_code_has_closed_its_own(machine):
    await run(machine, "import os; x = 1; os.close(0)")
    assert (await run(machine, "input(), x", options={"stdin": "one\n"})).shown == ["('one', 1)"]
    assert (await run(machine, "os.read(0, 9)")).shown == ["b''"]


async def test_stdin_is_empty(machine):
    assert (await run(machine, "import sys; sys.stdin.read()")).shown == ["''"]
    assert (await run(machine, "!cat")).finished.status == "ok"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%pwd", "/workspace"),
        ("pwd", "/workspace"),
        ("!echo hello", "hello"),
        ("x = !echo lines\nx", "lines"),
        ("%%bash\necho cell", "cell"),
        ("%timeit -n1 -r1 1", "per loop"),
        ("%%time\nsum(range(10))", "Wall time"),
        ("len?", "Return the number of items"),
        (">>> 1 + 1", "2"),
        ("    indented = 7\n    indented", "7"),
        ("import asyncio\nawait asyncio.sleep(0)\n'awaited'", "awaited"),
        ("from __future__ import annotations\ndef f(x: nosuch): pass\n'future'", "future"),
        ("get_ipython().user_ns is globals()", "True"),
        ("__name__", "__main__"),
        ("import sys; sys.argv", "['']"),
        ("import inspect\ndef f(): return 42\ninspect.getsource(f)", "return 42"),
    ],
)
async def test_ipython_features_work(machine, code, expected):
    result = await run(machine, code)
    assert result.finished.error is None
    assert expected in result.stdout + "".join(result.shown)


async def test_the_agents_own_modules_do_not_hide_the_users(machine):
    await machine.write("guest.py", b"value = 'mine'")
    assert (await run(machine, "import guest; guest.value")).shown == ["'mine'"]
    await command(machine, "rm guest.py")


@pytest.mark.parametrize(
    "expression", ["random.random()", "numpy.random.rand()", "tempfile.mktemp()", "uuid.uuid1().node"]
)
async def test_a_refresh_changes_what_random_generators_give(machine, expression):
    setup = (
        "import random, numpy, tempfile, uuid\nrandom.seed(1); numpy.random.seed(1); uuid.getnode(); tempfile.mktemp()"
    )
    await run(machine, f"{setup}\nexpected = {expression}\n{setup}")
    await machine.refresh(Identity("clone", "f" * 32, bytes(range(32))))
    if "uuid" in expression:
        assert (await run(machine, "uuid._node")).shown == []
    else:
        assert (await run(machine, f"{expression} == expected")).shown == ["False"]


@pytest.mark.parametrize("everything", [False, True])
async def test_generators_that_code_has_made_are_reseeded_if_all_are(machine, everything):
    made = """import random, numpy
class Picky(random.Random):
    def __init__(self, seed): super().__init__(seed)
def draws(): return [
    numpy.random.default_rng(3), numpy.random.Generator(numpy.random.Philox(3)), numpy.random.RandomState(3),
    random.Random(3), Picky(3)]
expected = [made.random() for made in draws()]
kept = draws()"""
    await run(machine, made)
    await machine.refresh(Identity("clone", "f" * 32, bytes(range(32)), reseed_all=everything))
    result = await run(machine, "[made.random() == value for made, value in zip(kept, expected)]")
    assert result.shown == [str([not everything] * 5)]


async def test_a_refresh_without_reseed_leaves_generators_alone(machine):
    await run(machine, "import random\nrandom.seed(1); expected = random.random(); random.seed(1)")
    await machine.refresh(Identity("clone", "f" * 32, bytes(32), reseed=False))
    assert (await run(machine, "random.random() == expected")).shown == ["True"]


async def test_a_new_kernel_does_not_repeat_the_random_values_of_the_last(machine):
    values = set()
    for _ in range(3):
        await run(machine, "import os; os._exit(0)")
        values.update((await run(machine, "import random, numpy.random; (random.random(), numpy.random.rand())")).shown)
    assert len(values) == 3


async def test_a_refresh_gives_the_machine_its_identity(machine):
    refreshed = await machine.refresh(Identity("clone-7", "ab" * 16, b"e" * 64))
    assert abs(refreshed.clock_skew_s) < 1.0
    assert refreshed.hostname_set
    assert (await run(machine, "import socket; socket.gethostname()")).shown == ["'clone-7'"]
    assert (await machine.read("/etc/hostname", limit=100)).data == b"clone-7\n"
    assert (await machine.read("/etc/machine-id", limit=100)).data == b"ab" * 16 + b"\n"


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_code_runs_as_an_ordinary_user_who_cannot_touch_the_agent(machine):
    assert (await run(machine, "import os; os.getuid(), os.getgid(), os.getgroups()")).shown == ["(1000, 1000, [])"]
    code = """import os
denied = 0
for pid in [int(name) for name in os.listdir('/proc') if name.isdigit()]:
    if os.stat(f'/proc/{pid}').st_uid != 1000:
        try: os.kill(pid, 9)
        except PermissionError: denied += 1
denied"""
    assert int((await run(machine, code)).shown[0]) >= 2  # agent, zygote
    assert (await run(machine, "open('/etc/passwd', 'a')")).finished.error.name == "PermissionError"  # type: ignore[union-attr]
    with pytest.raises(RequestRefused) as caught:
        await machine.write("/etc/passwd", b"x")
    assert caught.value.code == "denied"


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_no_process_of_a_killed_kernel_survives(machine):
    daemon = """import os, subprocess
subprocess.Popen(['setsid', 'sleep', '4242'], start_new_session=True)
os._exit(1)"""
    await run(machine, daemon)
    names = "[open(f'/proc/{p}/cmdline').read() for p in __import__('os').listdir('/proc') if p.isdigit()]"
    assert "4242" not in (await run(machine, names)).shown[0]


SLEEPS = """import os
def sleeps():
    lines = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try: lines.append(open(f'/proc/{pid}/cmdline').read().split('\\0'))
        except OSError: pass  # it has ended
    return sorted(line[1] for line in lines if line[0] == 'sleep')
"""
DAEMONS = f"""{SLEEPS}
import subprocess
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
subprocess.run('setsid sleep 1001 & (setsid sleep 1002 &); (sleep 1003 &)', shell=True)
while len(sleeps()) < 4: pass
"""


async def test_orphans_that_code_leaves_end_with_its_run_and_children_of_its_process_stay(machine):
    result = await run(machine, DAEMONS)
    assert "processes that this run left running were ended: 3." in result.stderr
    assert (await run(machine, "sleeps()")).shown == ["['1000']"]
    assert (await run(machine, "child.kill(); child.wait()")).shown == ["-9"]


async def test_orphans_that_code_leaves_stay_if_that_was_asked_for(machine):
    assert (await run(machine, DAEMONS, keep_processes=True)).stderr == ""
    assert (await run(machine, "sleeps()")).shown == ["['1000', '1001', '1002', '1003']"]
    await run(machine, "child.kill(); child.wait(); subprocess.run(['pkill', '-x', 'sleep'])")


async def test_a_stopped_run_leaves_no_process_and_those_of_earlier_runs_stay(machine):
    await run(machine, "import subprocess; earlier = subprocess.Popen(['sleep', '999'], start_new_session=True)")
    async with machine.run(RunCode(f"{DAEMONS.replace('< 4', '< 5')}\nprint('on')\nwhile True: pass")) as events:
        await anext(events)
        await events.stop()
        assert (await events.wait_finished()).state == "kept"
    assert (await run(machine, "sleeps()")).shown == ["['999']"]
    await run(machine, "earlier.kill(); earlier.wait()")


COUNT = """import os
count = 0
for pid in os.listdir('/proc'):
    try: count += pid.isdigit() and os.stat(f'/proc/{pid}').st_uid == 1000
    except FileNotFoundError: pass  # the parent that forked this kernel has just exited
count"""


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_a_fork_bomb_ends_the_run_and_not_the_machine(machine):
    code = "import os, signal\nn = 0\nwhile True:\n    if not os.fork(): os.setsid(); signal.pause()\n    n += 1"
    result = await run(machine, code)
    assert result.finished.error is not None
    assert result.finished.error.name == "BlockingIOError"
    assert 100 < int((await run(machine, "n")).shown[0]) < 500
    await run(machine, "os._exit(0)")
    many = "import os\nfor pid in [os.fork() or os._exit(0) for _ in range(100)]: os.waitpid(pid, 0)"
    assert (await run(machine, many)).finished.status == "ok"


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
@pytest.mark.parametrize("extra", ["", "os.setsid()", "os.kill(-1, 9)"])
async def test_a_bomb_that_never_ends_is_killed_with_all_its_processes(machine, extra):
    code = f"""import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('on')
parent = os.getpid()
while True:
    try:
        if not os.fork() or os.getpid() != parent:
            {extra}
            pass
    except OSError: pass"""
    async with machine.run(RunCode(code, grace_s=0.1)) as events:
        await anext(events)
        await events.stop()
        finished = await events.wait_finished()
    assert (finished.status, finished.state, finished.signal) == ("killed", "lost", "SIGKILL")
    assert (await run(machine, COUNT)).shown == ["1"]


async def test_the_first_run_starts_a_kernel_if_there_is_none():
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            assert (await run(client, "1 + 1")).shown == ["2"]


STILLBORN = """import os, guest.kernels.reseed as reseed
def die(self):
    with open('/tmp/births', 'a') as file: file.write('x')
    os._exit(7)
reseed.Generators.seed = die
"""


async def test_kernels_that_fail_to_start_are_not_restarted_endlessly():
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            with pytest.raises(RequestRefused, match="ended while starting") as caught:
                await client.warm(WarmUp(code=STILLBORN), LIMIT_S)
            assert caught.value.code == "no_kernel"
            for _ in range(5):
                with pytest.raises(RequestRefused) as caught:
                    await run(client, "1")
                assert caught.value.code == "no_kernel"
            assert (await client.read("/tmp/births", limit=100)).size <= 3 + 5


MORTAL = """import os, threading, time, xml.dom
with open('/tmp/zygote', 'w') as file: file.write(str(os.getpid()))
def wait():
    while not os.path.exists('/workspace/end'): time.sleep(0.01)
    os.remove('/workspace/end')
    os._exit(1)
threading.Thread(target=wait, daemon=True).start()
"""


async def test_a_zygote_that_ends_does_not_affect_its_kernel_and_is_replaced_warm():
    code = "import os\nzygote = open('/tmp/zygote').read()\nprint('on')\nwhile os.path.exists(f'/proc/{zygote}'): pass"
    with anyio.fail_after(LIMIT_S):
        async with agent_client(MORTAL) as client:
            async with client.run(RunCode(code)) as events:
                await anext(events)
                await client.write("end", b"")
                assert (await events.wait_finished()).state == "kept"
            await run(client, "os._exit(0)")
            assert (await run(client, "import sys; 'xml.dom' in sys.modules")).shown == ["True"]


async def test_failing_warm_up_code_is_reported_with_its_traceback():
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            with pytest.raises(RequestRefused, match="no_such_module"):
                await client.warm(WarmUp(code="import no_such_module"), LIMIT_S)


async def test_warm_up_code_leaves_its_imports_and_not_its_names():
    with anyio.fail_after(LIMIT_S):
        async with agent_client("import xml.dom; leak = 1") as client:
            assert (await run(client, "import sys; 'xml.dom' in sys.modules")).shown == ["True"]
            assert (await run(client, "'leak' in globals()")).shown == ["False"]
