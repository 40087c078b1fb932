"""The time to compile and run a small program in a sandbox, compared with the bare host."""

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from guest.client import AgentClient
from guest.client.messages import Finished, RunCode
from guest.client.reports import CompiledReport
from mcp_sandbox.commands.bench.native import native_process, template_files
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.errors import TemplateNotBuilt

BUILD = "/tmp/.build"  # noqa: S108 - in the machine, or on a tmpfs over the template's files
CPP = """#include <bits/stdc++.h>
int main() { std::cout << "hello, world" << std::endl; }
"""
GO = """package main

import "fmt"

func main() { fmt.Println("hello, world") }
"""
NO_PCH = ("-D_REENTRANT",)  # the headers test this macro: the precompiled ones do not fit

# Enters the template's files with an empty /tmp. The mounts vanish with the last process of their namespace.
ENTER = """
mount -t tmpfs tmpfs "$0/tmp" && mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && mkdir "$0$1" &&
exec chroot "$0" /usr/bin/python3 -c "$2" "$1"
"""
# Compiles and runs each program it reads, and prints the seconds that took. Runs in the template's Python.
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


@dataclass(frozen=True, slots=True)
class Language:
    """A program, and the command that compiles it without a sandbox."""

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
        native="g++ main.cpp -o program -O2 -std=c++23",
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
PCH_TIMES_FASTER = 3.0


async def measure(subject: Subject) -> Findings:
    """Measure each language whose template is built."""
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
    """Alternate between native rounds and rounds in a machine, because the host's speed varies over minutes."""
    rounds = subject.plan.compiles
    native_s, inside_s, slow_s = [], [], []
    tree = await template_files(subject)
    argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", ENTER, str(tree), BUILD, WORKER]
    order = {
        "source": language.source,
        "command": shlex.split(language.native),
        "env": dict(subject.built.template.env),
    }
    async with native_process(argv) as native, subject.start("bench-compile") as (_, agent):
        for number in range(rounds + 1):
            subject.progress(f"{language.title}, natively and in a machine: {number} of {rounds}")
            code = f"{language.code}// {number}\n"  # so that no cache has it
            native_s.append(await native(json.dumps({**order, "code": code}).encode()))
            inside_s.append(await _inside(agent, code))
            if language.template == "cpp-algorithm":
                slow_s.append(await _inside(agent, code, NO_PCH))
    return _findings(language, native_s[1:], inside_s[1:], slow_s[1:])  # the first round fills the page cache


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
            figure("the same without precompiled headers", "ms", [1000 * value for value in slow_s])
        )
        findings.promises.append(
            Promise(f"{title}, faster with precompiled headers", faster, PCH_TIMES_FASTER, "times", at_least=True)
        )
    return findings


async def _inside(agent: AgentClient, code: str, flags: Sequence[str] | None = None) -> float:
    """Compile and run code in the machine and return the seconds that took."""
    options = {"flags": list(flags)} if flags else None
    began = anyio.current_time()
    status, diagnostics = "", ""
    async with agent.run(RunCode(code=code, options=options)) as run:
        async for event in run:
            if isinstance(event, CompiledReport):
                diagnostics = event.diagnostics
            if isinstance(event, Finished):
                status = event.status
    if status != "ok":
        raise MeasurementFailed(f"A run ended with {status}. {diagnostics}")
    return anyio.current_time() - began
