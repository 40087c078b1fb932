"""Services of an agent that runs natively. It shares this host's network, so these services use files."""

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import RunCode, Service, WarmUp
from guest.errors import RequestRefused
from tests.functional.guest_harness import SANDBOX_USER, SEPARATE_USER, agent_client, run
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio

LIMIT_S = HANG_S
STAY = "exec sleep infinity"
SHELL = ("/bin/sh", "-c")

ALIVE = """
import os
def told_of_all(name):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            yield open(f'/proc/{pid}/{name}').read()
        except OSError:  # it has ended
            pass
def alive():
    names = [line.split(chr(0)) for line in told_of_all('cmdline')]
    return sorted(name[1] for name in names if name[0] == 'sleep')
alive()
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def served(start: str, ready: str, *, code: str = "", ready_timeout_s: float = LIMIT_S) -> WarmUp:
    service = Service((*SHELL, start), (*SHELL, ready), {"GREETING": "hello"}, "/tmp", ready_timeout_s)
    return WarmUp(code=code, env={"ADDRESSEE": "world"}, service=service)


async def lost_service(client: AgentClient) -> str:
    """Return how the service ended, as soon as the agent knows."""
    while True:
        if (loss := (await run(client, "")).finished.service_loss) is not None:
            return loss


async def test_a_service_has_its_variables_and_directory_and_is_ready_before_the_warm_up_code():
    ours = "$(python3 -c 'import guest' 2>/dev/null && echo ours)"
    start = f'echo "$GREETING $ADDRESSEE $(id -u) $(pwd) [{ours}]" >told; {STAY}'
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            await client.warm(served(start, "test -s told", code="assert open('/tmp/told').read()"), LIMIT_S)
            told = await run(client, "import os; print(os.getuid(), open('/tmp/told').read())")
    user, greeting = told.stdout.split(maxsplit=1)
    assert greeting.strip() == f"hello world {user} /tmp []"


async def test_the_ready_command_is_tried_until_it_succeeds():
    ready = 'echo again >>tries; test "$(wc -l <tries)" = 4'
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            await client.warm(served(STAY, ready), LIMIT_S)
            assert (await run(client, "print(open('/tmp/tries').read().count('again'))")).stdout == "4\n"


@pytest.mark.parametrize(
    ("options", "user"), [((), SANDBOX_USER), (("--one-kernel",), SANDBOX_USER), (("--own-pids",), "none")]
)
async def test_a_service_and_its_descendants_outlive_a_kernel_and_its_leftovers(options, user):
    start = f"setsid sleep 1001 & (setsid sleep 1002 &); sleep 1003 & {STAY}"
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None, *options, user=user) as client:
            await client.warm(served(start, 'test "$(pgrep -cx sleep)" = 4'), LIMIT_S)
            mine = ["1001", "1002", "1003", "infinity"]
            assert (await run(client, ALIVE)).shown == [str(mine)]
            left = "import subprocess; subprocess.Popen(['sleep', '2000'], start_new_session=True)"
            await run(client, f"{left}\nwhile '2000' not in alive(): pass")
            assert (await run(client, "os.kill(os.getpid(), 9)")).finished.state == "lost"
            assert (await run(client, ALIVE)).shown == [str(mine)]
            states = (await run(client, "{line.split(') ')[1][0] for line in told_of_all('stat')}")).shown[0]
            assert "T" not in states, "some are still stopped"


BOMB = """import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('on')
parent = os.getpid()
while True:
    try:
        if not os.fork() or os.getpid() != parent:
            os.setsid()
    except OSError: os.kill(-1, signal.SIGCONT)"""


@pytest.mark.skipif(not SEPARATE_USER, reason="needs root, to map a second user id")
async def test_a_service_outlives_a_bomb_that_fights_being_stopped():
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            await client.warm(served(STAY, "true"), LIMIT_S)
            async with client.run(RunCode(BOMB, grace_s=0.1)) as events:
                await anext(events)
                await events.stop()
                assert (await events.wait_finished()).state == "lost"
            assert (await run(client, ALIVE)).shown == ["['infinity']"]
            mine = "sum(os.stat(f'/proc/{pid}').st_uid == 1000 for pid in os.listdir('/proc') if pid.isdigit())"
            assert (await run(client, mine)).shown == ["2"], "more than the service and the kernel"


@pytest.mark.parametrize(
    ("start", "ready", "why"),
    [
        (
            "echo no such database; exit 3",
            "false",
            r"start_cmd ended \(exit code 3\).*foreground(?s:.*)no such database",
        ),
        ("kill -SEGV $$", "false", r"start_cmd ended \(SIGSEGV\)"),
        (f"echo listening; {STAY}", "echo refused; false", r"within 4 s(?s:.*)refused(?s:.*)listening"),
        (STAY, "echo waiting; sleep infinity", r"within 4 s(?s:.*)waiting(?s:.*)start_cmd wrote nothing"),
    ],
)
async def test_a_service_that_does_not_become_ready_is_reported_with_the_reason(start, ready, why):
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            # One that ends is noticed at once, so its timeout may be longer than that of the test. The others need time
            # for one try of ready_cmd on a busy host.
            limit = 4 if "within" in why else 2 * LIMIT_S
            with pytest.raises(RequestRefused, match=why):
                await client.warm(served(start, ready, ready_timeout_s=limit), LIMIT_S)


@pytest.mark.parametrize(
    ("command", "cwd", "why"),
    [
        ("/no/such/program", "/tmp", "/no/such/program cannot be started: .*No such file"),
        ("/bin/sh", "/nowhere", "'/nowhere'"),
    ],
)
async def test_a_missing_program_or_directory_of_a_service_is_named(command, cwd, why):
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            with pytest.raises(RequestRefused, match=why):
                await client.warm(WarmUp(service=Service((command,), (*SHELL, "false"), {}, cwd, LIMIT_S)), LIMIT_S)


async def test_every_result_reports_a_service_that_has_ended_with_the_end_of_its_output():
    start = f"head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last words; touch flooded; {STAY}"
    with anyio.fail_after(LIMIT_S):
        async with agent_client(None) as client:
            await client.warm(served(start, "test -e flooded"), LIMIT_S)
            assert (await run(client, ALIVE)).finished.service_loss is None
            await run(client, "import subprocess; subprocess.run(['pkill', '-x', 'sleep'])")
            loss = await lost_service(client)
            assert loss.startswith("SIGTERM; its last output: xxx")
            assert loss.endswith("last words")
            assert len(loss) < 500
            assert (await run(client, "os.kill(os.getpid(), 9)")).finished.service_loss == loss
            assert (await run(client, "1")).finished.service_loss == loss
