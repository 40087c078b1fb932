"""What it takes to compile and run a small program in a sandbox, against the same on the bare host."""

import json
import shlex
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from guest.client import AgentClient
from guest.client.messages import Finished, RunCode
from guest.client.reports import CompiledReport
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.errors import TemplateNotBuilt
from vmm.driver import DriverConfig, load_driver
from vmm.limits import control_group, detect
from vmm.process import Confinement, spawn
from vmm.types import Limits

MAX_LINE = 4000
BUILD = "/tmp/.build"  # noqa: S108 - in the machine, or over the template's files
CPP = """#include <bits/stdc++.h>
int main() { std::cout << "hello, world" << std::endl; }
"""
GO = """package main

import "fmt"

func main() { fmt.Println("hello, world") }
"""
UNFIT = ("-O2", "-std=c++20", "-D_REENTRANT")  # headers compiled ahead do not fit a macro that they ask for

# The template's files with a /tmp of its own; what is mounted goes with its last process.
PLACE = """
mount -t tmpfs tmpfs "$0/tmp" && mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && mkdir "$0$1" &&
exec chroot "$0" /usr/bin/python3 -c "$2" "$1"
"""
# Compiles and runs what it is told to, and says how long that took. It is the template's own Python.
WORKER = """
import json, os, subprocess, sys, time
os.chdir(sys.argv[1])
for line in sys.stdin:
    order = json.loads(line)
    with open(order["source"], "w") as file:
        file.write(order["code"])
    began = time.perf_counter()
    subprocess.run(order["command"], check=True, env={**os.environ, **order["env"]}, stdout=subprocess.DEVNULL)
    subprocess.run(["./program"], check=True, stdout=subprocess.DEVNULL)
    print(time.perf_counter() - began, flush=True)
"""

Round = Callable[[str], Awaitable[float]]  # gets code, gives seconds


@dataclass(frozen=True, slots=True)
class Language:
    """What is compiled, and how people would do it on their own."""

    template: str
    title: str
    source: str
    code: str
    native: str  # the command, in the directory with the source
    times_native: float


LANGUAGES = (
    Language(
        template="cpp-algorithm",
        title="hello world in C++ with <bits/stdc++.h>",
        source="main.cpp",
        code=CPP,
        native="g++ main.cpp -o program -O2 -std=c++20",
        times_native=1.5,
    ),
    Language(
        template="go-algorithm",
        title="hello world in Go",
        source="main.go",
        code=GO,
        native="go build -o program main.go",
        times_native=2.0,
    ),
)
TIMES_FASTER = 3.0  # with headers that were compiled ahead


async def measure(subject: Subject) -> Findings:
    """Each language for itself; one whose template is not built is left out."""
    findings = Findings()
    for language in LANGUAGES:
        template = subject.settings.catalogue.load(language.template)
        built = await subject.builder.find(template, subject.driver)
        if built is None:
            findings.left_out.append(str(TemplateNotBuilt(language.template)))
            continue
        findings.add(await _measure(replace(subject, built=built), language))
    return findings


async def _measure(subject: Subject, language: Language) -> Findings:
    """Rounds natively and in a machine, taking turns: the host's own speed changes from minute to minute."""
    rounds = subject.plan.compiles
    native_s, inside_s, slow_s = [], [], []
    async with (
        _native(await _tree(subject), language, subject.built.template.env) as native,
        subject.start("bench-compile") as (_, agent),
    ):
        for number in range(rounds + 1):
            subject.tell(f"{language.title}, natively and in a machine: {number} of {rounds}")
            code = f"{language.code}// {number}\n"  # nothing may have compiled it before
            native_s.append(await native(code))
            inside_s.append(await _inside(agent, code))
            if language.template == "cpp-algorithm":
                slow_s.append(await _inside(agent, code, UNFIT))
    return _findings(language, native_s[1:], inside_s[1:], slow_s[1:])  # the first round reads all files


def _findings(
    language: Language, native_s: Sequence[float], inside_s: Sequence[float], slow_s: Sequence[float]
) -> Findings:
    title = language.title
    ratio = statistics.median(inside / native for native, inside in zip(native_s, inside_s, strict=True))
    findings = Findings(
        [
            figure(f"{title}, natively", "ms", [1000 * value for value in native_s]),
            figure("the same in a machine", "ms", [1000 * value for value in inside_s]),
        ],
        [Promise(f"{title} against native", ratio, language.times_native, "times")],
    )
    if slow_s:
        faster = statistics.median(slow / inside for slow, inside in zip(slow_s, inside_s, strict=True))
        findings.figures.append(
            figure("the same without headers compiled ahead", "ms", [1000 * value for value in slow_s])
        )
        findings.promises.append(
            Promise(f"{title}, faster with headers compiled ahead", faster, TIMES_FASTER, "times", at_least=True)
        )
    return findings


async def _inside(agent: AgentClient, code: str, flags: Sequence[str] | None = None) -> float:
    """Seconds from asking to the end of the run."""
    options = {"flags": list(flags)} if flags else None
    began = anyio.current_time()
    ended, said = "", ""
    async with agent.run(RunCode(code=code, options=options)) as run:
        async for event in run:
            if isinstance(event, CompiledReport):
                said = event.diagnostics
            if isinstance(event, Finished):
                ended = event.status
    if ended != "ok":
        raise MeasurementFailed(f"A run ended with {ended}. {said}")
    return anyio.current_time() - began


async def _tree(subject: Subject) -> Path:
    """The files of the template, as bubblewrap has them: unpacked now if nobody has done it yet."""
    settings = subject.settings
    bubblewrap = load_driver("bubblewrap", DriverConfig(settings.run_dir, settings.cache_dir))
    subject.tell("unpacking the template's files")
    return (await subject.builder.build(subject.built.template, bubblewrap)).root


@asynccontextmanager
async def _native(tree: Path, language: Language, env: Mapping[str, str]) -> AsyncIterator[Round]:
    """The template's own compiler and headers, as plain processes of this host.

    They have a control group, though without ceilings, as machines do: on a busy host each group gets an equal share.
    """
    argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", PLACE, str(tree), BUILD, WORKER]
    order: dict[str, Any] = {"source": language.source, "command": shlex.split(language.native), "env": dict(env)}
    async with (
        control_group(detect(), "bench-native", Limits()) as group,
        spawn(group.wrap(argv), confinement=Confinement(offline=False), before_start=group.add, talks=True) as process,
    ):
        answers = BufferedByteReceiveStream(process.stream)

        async def work(code: str) -> float:
            await process.stream.send(json.dumps({**order, "code": code}).encode() + b"\n")
            return float(await answers.receive_until(b"\n", MAX_LINE))

        yield work
