"""The machine that reaches the web: jobs in processes of their own, and machines that come and go around them."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from guest.jobs import ANSWER, JOB, PREFACE, TOKEN_USER
from tests.waiting import HANG_S
from tests.web.fake_machine import FakeMachine, FakeMachines, Wire, say_hello
from tests.web.local_machine import LocalMachines, certificates
from tests.web.sites import Page, answering, pages, trusting
from tests.web.world import World, forget_proxies
from websearch import singleton as singleton_module
from websearch import workers as workers_module
from websearch.access import Caller
from websearch.jobs import Answer, JobFailed
from websearch.providers import make_provider, secrets_of
from websearch.singleton import Condition, Limits, Singleton, decide
from websearch.workers import MAX_JOBS, OWNER_JOBS, WORKER_S, WorkerLost, Workers

ANN = Caller("ann", "web")
FETCH: dict[str, Any] = {"format": "text", "max_bytes": 1_000_000, "time_s": 60}
WELL = Condition(requests=1, active=0, age_s=1, unused_s=1, memory_bytes=1, well=True)
LIMITS = Limits(idle_s=100, max_requests=10, max_age_s=1000, max_memory_bytes=500)
HELLO = Page(b"hello", headers={"Content-Type": "text/plain"})


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_proxies(monkeypatch)


@asynccontextmanager
async def singleton(world: World, limits: Limits | None = None) -> AsyncIterator[tuple[Singleton, LocalMachines]]:
    machines = LocalMachines()
    with anyio.fail_after(HANG_S):
        async with Singleton(machines, world.bridge_for, limits) as web:
            yield web, machines


async def fetch(web: Singleton, url: str, caller: Caller = ANN, **fields: object) -> Answer:
    return await web.run("fetch", {**FETCH, "url": url, **fields}, caller=caller, timeout_s=HANG_S)


async def ask(web: Singleton) -> Answer:
    return await web.run("fetch", {}, caller=ANN, timeout_s=HANG_S)


async def test_no_machine_is_started_before_it_is_needed():
    async with singleton(World()) as (_web, machines):
        assert machines.started == []


async def test_one_machine_serves_many_requests_at_once():
    world = World()
    answers: list[bytes] = []
    async with world.site("site.example", pages(lambda path: Page(path.encode()))) as site:
        async with singleton(world) as (web, machines), anyio.create_task_group() as tasks:

            async def one(path: str) -> None:
                answers.append((await fetch(web, f"{site}/{path}")).body)

            for number in range(10):
                tasks.start_soon(one, str(number))
        assert sorted(answers) == sorted(f"/{number}".encode() for number in range(10))
        assert len(machines.started) == 1


async def test_a_secure_site_is_fetched_with_the_certificates_of_the_job():
    world = World()
    async with world.site("site.example", pages({"/": HELLO}), secure=True) as site, singleton(world) as (web, _):
        answer = await fetch(web, f"{site}/", certificates=certificates(world.authority))
        assert answer.body == b"hello"
        with pytest.raises(JobFailed) as failed:
            await fetch(web, f"{site}/")
        assert failed.value.code == "tls"


async def test_connections_are_recorded_for_the_caller_of_their_job():
    world = World()
    async with world.site("site.example", pages({"/": HELLO})) as site, singleton(world) as (web, _):
        await fetch(web, f"{site}/", Caller("ann", "web"))
        await fetch(web, f"{site}/", Caller("bob", "web"))
    assert [access.caller.owner for access in world.accesses] == ["ann", "bob"]


async def test_a_refused_address_is_an_error_with_its_rule():
    async with singleton(World()) as (web, _):
        with pytest.raises(JobFailed) as failed:
            await fetch(web, "http://10.0.0.1/")
    assert (failed.value.code, failed.value.fields["rule"]) == ("refused", "address-private")


# ---------------------------------------------------------------- machines that come and go


async def test_a_machine_that_dies_does_not_lose_its_request():
    async def die_once(machine: FakeMachine) -> bytes:
        if len(machines.started) == 1:
            machine.died.set()
            await anyio.sleep_forever()
        return b"hello"

    machines = FakeMachines(die_once)
    async with Singleton(machines, World().bridge_for) as web:
        with anyio.fail_after(HANG_S):
            assert (await ask(web)).body == b"hello"
    assert len(machines.started) == 2


async def test_a_machine_is_replaced_while_its_requests_finish():
    asked, go_on = anyio.Event(), anyio.Event()

    async def first_is_slow(machine: FakeMachine) -> bytes:
        if machine is not machines.started[0]:
            return b"new machine"
        if not asked.is_set():
            asked.set()
            await go_on.wait()
        return b"old machine"

    machines = FakeMachines(first_is_slow)
    answers: list[bytes] = []
    async with Singleton(machines, World().bridge_for, replace(LIMITS, max_requests=1, check_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:

                async def patient() -> None:
                    answers.append((await ask(web)).body)

                tasks.start_soon(patient)
                await asked.wait()
                while (await ask(web)).body != b"new machine":
                    pass
                assert machines.started[0] not in machines.ended
                go_on.set()
            assert answers == [b"old machine"]
            await machines.started[0].closed.wait()


@pytest.mark.parametrize("sign", ["ill", "memory"])
async def test_a_machine_that_is_ill_or_grows_is_replaced(sign: str):
    machines = FakeMachines(say_hello)
    async with Singleton(machines, World().bridge_for, replace(LIMITS, check_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            await ask(web)
            setattr(machines.started[0], sign, 500)
            await machines.started[0].closed.wait()
            assert (await ask(web)).body == b"hello"
    assert len(machines.started) == 2


async def test_an_unused_machine_is_stopped_and_the_next_request_starts_another():
    machines = FakeMachines(say_hello)
    async with Singleton(machines, World().bridge_for, replace(LIMITS, idle_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            await ask(web)
            await machines.started[0].closed.wait()
            assert (await ask(web)).body == b"hello"
    assert len(machines.started) >= 2


async def test_a_machine_that_cannot_start_is_an_error_and_is_tried_again():
    machines = FakeMachines(say_hello)
    async with Singleton(machines, World().bridge_for) as web:
        machines.failure = OSError("no such template")
        with pytest.raises(JobFailed) as failed:
            await ask(web)
        assert (failed.value.code, str(failed.value)) == ("unavailable", "no such template")
        machines.failure = None
        assert (await ask(web)).body == b"hello"


async def test_a_job_that_takes_too_long_ends_and_frees_its_worker():
    asked: list[FakeMachine] = []

    async def second_never_ends(machine: FakeMachine) -> bytes:
        asked.append(machine)
        if len(asked) == 2:
            await anyio.sleep_forever()
        return b"hello"

    machines = FakeMachines(second_never_ends)
    async with Singleton(machines, World().bridge_for) as web:
        await ask(web)  # so that workers wait, and the time is the job's alone
        with pytest.raises(JobFailed) as failed:
            await web.run("fetch", {}, caller=ANN, timeout_s=0.01)
        assert failed.value.code == "timeout"
        assert (await ask(web)).body == b"hello"
    assert len(machines.started) == 1


async def test_a_machine_without_workers_is_left_even_if_many_wait_and_its_agent_answers(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(workers_module, "WORKER_S", 0.5)
    machines = FakeMachines(say_hello, without_workers=1)
    answers: list[bytes] = []
    async with Singleton(machines, World().bridge_for) as web:
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    answers.append((await ask(web)).body)

                for _ in range(3):
                    tasks.start_soon(one)
    assert answers == [b"hello"] * 3
    assert len(machines.started) == 2


async def test_a_machine_whose_jobs_only_time_out_is_replaced():
    async def first_machine_hangs(machine: FakeMachine) -> bytes:
        if machine is machines.started[0]:
            await anyio.sleep_forever()
        return b"hello"

    machines = FakeMachines(first_machine_hangs)
    async with Singleton(machines, World().bridge_for, replace(LIMITS, max_overdue=2, check_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            for _ in range(2):
                with pytest.raises(JobFailed, match="longer than"):
                    await web.run("fetch", {}, caller=ANN, timeout_s=0.5)
            await machines.started[0].closed.wait()
            assert (await ask(web)).body == b"hello"


async def test_a_machine_that_cannot_be_replaced_goes_on():
    machines = FakeMachines(say_hello)
    async with Singleton(machines, World().bridge_for, replace(LIMITS, check_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            await ask(web)
            machines.failure = OSError("no memory")
            machines.started[0].memory = 500
            await machines.failed.wait()
            await anyio.wait_all_tasks_blocked()
            assert (await ask(web)).body == b"hello"
    assert len(machines.started) == 1


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_machine_that_is_lost_during_its_replacement_is_followed_by_it(
    attempts: int, monkeypatch: pytest.MonkeyPatch
):
    async def fall_silent(machine: FakeMachine) -> bytes:
        if machine is machines.started[0] and machines.gate is not None:
            raise anyio.EndOfStream
        return b"hello"

    monkeypatch.setattr(singleton_module, "ATTEMPTS", attempts)
    machines = FakeMachines(fall_silent)
    async with Singleton(machines, World().bridge_for, replace(LIMITS, check_s=0.001)) as web:
        with anyio.fail_after(HANG_S):
            await ask(web)
            machines.gate = anyio.Event()
            async with anyio.create_task_group() as tasks:

                async def lose() -> None:
                    with suppress(JobFailed):
                        await ask(web)

                machines.started[0].memory = 500
                await machines.knocked.wait()
                tasks.start_soon(lose)
                await anyio.wait_all_tasks_blocked()
                machines.gate.set()
            assert (await ask(web)).body == b"hello"
            await machines.started[0].closed.wait()
    assert len(machines.started) == 2


async def test_a_machine_that_takes_too_long_to_start_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(singleton_module, "START_S", 0.01)
    machines = FakeMachines(say_hello, gate=anyio.Event())
    async with Singleton(machines, World().bridge_for) as web:
        with pytest.raises(JobFailed) as failed:
            await ask(web)
    assert str(failed.value) == "its machine did not start within 0.01 s"


@pytest.mark.parametrize(
    ("condition", "what"),
    [
        (WELL, "keep"),
        (replace(WELL, unused_s=100), "stop"),
        (replace(WELL, unused_s=100, active=1), "keep"),
        (replace(WELL, requests=10), "replace"),
        (replace(WELL, age_s=1000), "replace"),
        (replace(WELL, memory_bytes=500), "replace"),
        (replace(WELL, overdue=5), "replace"),
        (replace(WELL, well=False, active=1), "stop"),
    ],
)
def test_what_becomes_of_a_machine_depends_on_its_condition(condition: Condition, what: str):
    assert decide(condition, LIMITS) == what


# ---------------------------------------------------------------- hostile machines


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET http://site.example/ HTTP/1.1\r\nHost: site.example\r\n\r\n",
        b"GET http://site.example/ HTTP/1.1\r\nHost: site.example\r\nProxy-Authorization: Basic am9iOm9sZA==\r\n\r\n",
        b"GET http://site.example/ HTTP/1.1\r\nHost: site.example\r\nProxy-Authorization: Basic \xff\r\n\r\n",
        b"CONNECT site.example:443 HTTP/1.1\r\nHost: site.example\r\nProxy-Authorization: Bearer x\r\n\r\n",
    ],
)
async def test_a_connection_without_the_token_of_a_job_reaches_nothing(request_head: bytes):
    world = World()
    wire = Wire(*(bytes([byte]) for byte in request_head))
    with anyio.fail_after(HANG_S):
        await Workers(world.bridge_for).serve(wire)
    assert wire.received.startswith(b"HTTP/1.1 407")
    assert world.accesses == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ANSWER.pack(2**31, 0), "too large"),
        (ANSWER.pack(2, 2**31) + b"{}", "too large"),
        (ANSWER.pack(2, 0) + b"[]", "nonsense"),
        (ANSWER.pack(4, 0) + b"\xff\xfe{}", "nonsense"),
        (ANSWER.pack(20, 0) + b'{"error": {"code":1}}'[:20], "nonsense"),
    ],
)
async def test_nonsense_of_a_worker_fails_its_job_only(answer: bytes, said: str):
    workers = Workers(World().bridge_for)
    wire = Wire(PREFACE)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.serve, wire)
            await anyio.wait_all_tasks_blocked()
            wire.sent.append(answer)
            wire.closed.set()
            with pytest.raises(JobFailed, match=said):
                await workers.run("fetch", {}, caller=ANN, timeout_s=1)


async def test_workers_that_speak_or_end_before_they_have_a_job_get_none():
    workers = Workers(World().bridge_for)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.serve, early := Wire(PREFACE, b"x" * 100))
            tasks.start_soon(workers.serve, ended := Wire(PREFACE))
            await anyio.wait_all_tasks_blocked()
            ended.closed.set()
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(workers.serve, good := Wire(PREFACE))
            await anyio.wait_all_tasks_blocked()
            good.sent.append(ANSWER.pack(2, 2) + b"{}ok")
            good.closed.set()
            assert (await workers.run("fetch", {}, caller=ANN, timeout_s=1)).body == b"ok"
    assert early.received == ended.received == b""


async def test_one_owner_does_not_take_all_workers():
    workers = Workers(World().bridge_for)
    wires = [Wire(PREFACE) for _ in range(MAX_JOBS)]
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for wire in wires:
                tasks.start_soon(workers.serve, wire)
            for owner in ["ann"] * MAX_JOBS + ["bob"]:
                run = partial(workers.run, "fetch", {"of": owner}, caller=Caller(owner, "web"), timeout_s=HANG_S)
                tasks.start_soon(run)
                await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    owners = [json.loads(wire.received[JOB.size :])["of"] for wire in wires if wire.received]
    assert sorted(owners) == ["ann"] * OWNER_JOBS + ["bob"]


@pytest.mark.parametrize(("slow", "waiting"), [(["ann"] * OWNER_JOBS, "ann"), (["ann"] * 4 + ["bob"] * 2, "eve")])
async def test_slow_jobs_make_room_for_one_that_waits(slow: list[str], waiting: str, monkeypatch: pytest.MonkeyPatch):
    """The oldest one ends; each job that waits ends one of them, and without one they have all their time."""
    monkeypatch.setattr(workers_module, "PATIENCE", 0.0)
    workers = Workers(World().bridge_for)
    failures: list[JobFailed] = []

    async def hang(number: int, owner: str) -> None:
        try:
            await workers.run("fetch", {"of": number}, caller=Caller(owner, "web"), timeout_s=10 * HANG_S)
        except JobFailed as error:
            failures.append(error)
            tasks.start_soon(workers.serve, last)  # the machine starts another process

    last = Wire(PREFACE)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for number, owner in enumerate(slow):
                tasks.start_soon(workers.serve, Wire(PREFACE))
                tasks.start_soon(hang, number, owner)
                await anyio.wait_all_tasks_blocked()
            assert failures == []
            tasks.start_soon(partial(workers.run, "fetch", {}, caller=Caller(waiting, "web"), timeout_s=HANG_S))
            while not last.received:
                await anyio.lowlevel.checkpoint()
            assert [error.code for error in failures] == ["in_the_way"]
            tasks.cancel_scope.cancel()


async def test_the_wait_for_a_worker_counts_in_the_time_of_a_job():
    with anyio.fail_after(WORKER_S / 2):
        with pytest.raises(WorkerLost, match="no process was free in time"):
            await Workers(World().bridge_for).run("search", {}, caller=ANN, timeout_s=0.01)


class HostileWorker(Wire):
    """A worker that takes a job and does what it likes with its token."""

    def __init__(self) -> None:
        super().__init__(PREFACE)
        self.has_job = anyio.Event()

    async def send(self, item: bytes) -> None:
        await super().send(item)
        self.has_job.set()

    @property
    def token(self) -> str:
        return str(json.loads(self.received[JOB.size :])["token"])


@pytest.mark.parametrize(("kind", "keys_used"), [("search", 1), ("fetch", 0)])
async def test_only_searches_can_use_an_api_key(kind: str, keys_used: int):
    world = World()
    seen: list[bytes] = []
    async with world.site("site.example", answering(HELLO.encoded(), seen), secure=True) as site:
        provider = make_provider("brave", endpoint=f"{site}/search", key="s3cret")
        world.secrets, world.tls = secrets_of([provider]), trusting(world.authority)
        workers, worker = Workers(world.bridge_for), HostileWorker()
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(workers.serve, worker)
                tasks.start_soon(partial(workers.run, kind, {}, caller=ANN, timeout_s=HANG_S))
                await worker.has_job.wait()
                credentials = base64.b64encode(f"{TOKEN_USER}:{worker.token}".encode()).decode()
                headers = {
                    "Host": site.removeprefix("https://"),
                    "Proxy-Authorization": f"Basic {credentials}",
                    "X-Subscription-Token": provider.fields["key"],
                    "Connection": "close",
                }
                head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                connection = Wire(f"GET {site}/search HTTP/1.1\r\n{head}\r\n".encode())
                await workers.serve(connection)
                tasks.cancel_scope.cancel()
    assert [b"s3cret" in head for head in seen] == [True] * keys_used
    assert (b"refused by mcp-sandbox: scheme" in connection.received) == (not keys_used)
