"""All cases of the self-test: what must hold, how it is tried, whom it concerns, and what to do if it does not hold."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from guest.errors import GuestError
from mcp_sandbox.commands.selftest import basics, bombs, trespasses
from mcp_sandbox.commands.selftest.inside import agent, host, network, privileges, system_calls
from mcp_sandbox.commands.selftest.results import CaseResult, Outcome, Verdict, failed, not_applicable
from mcp_sandbox.commands.selftest.subject import Attack, Subject
from mcp_sandbox.errors import SandboxError
from vmm.errors import VmmError
from vmm.types import Isolation

CASE_S = 300.0  # a hang: filling a disk takes minutes on an emulated CPU, everything else seconds

Check = Callable[[Subject], Awaitable[Outcome]]

REPORT = "Choose another driver for untrusted code, and report it as SECURITY.md describes."
REBUILD = "Run `mcp-sandbox template build`. If it stays broken, report it as SECURITY.md describes."
LIMITS = (
    "See `mcp-sandbox doctor` for limits that are missing on this host. If none is, report it as SECURITY.md describes."
)
BUG = "See `mcp-sandbox doctor`. If this host is ready, please report a bug."


def _nobody(_subject: Subject) -> str | None:
    return None


def _one_user(subject: Subject) -> str | None:
    if subject.capabilities.isolation is not Isolation.NAMESPACE:
        return None
    return "the agent is the same user as the code, see docs/threat-model.md"


def _shown_to_all(subject: Subject) -> str | None:
    if subject.capabilities.isolation is not Isolation.KERNEL:
        return None
    return "gVisor shows it to all users; it is the same in every machine"


def _no_snapshots(subject: Subject) -> str | None:
    return None if subject.capabilities.snapshot else "this driver takes no snapshots"


def _namespaces_allowed(subject: Subject) -> str | None:
    return "the template allows user_namespaces" if subject.template.user_namespaces else None


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that must hold. Its name is the sentence that says so."""

    topic: str
    name: str
    check: Check
    advice: str = REPORT
    exempt: Callable[[Subject], str | None] = _nobody  # returns why the case does not concern a driver or template
    limit_s: float = CASE_S

    async def run(self, subject: Subject) -> CaseResult:
        """Carry the case out. A problem on the way is a result, too."""
        began = anyio.current_time()
        outcome = await self._outcome(subject)
        bad = outcome.verdict in (Verdict.BROKEN, Verdict.FAILED)
        return CaseResult(
            topic=self.topic,
            name=self.name,
            verdict=outcome.verdict,
            detail=outcome.detail,
            advice=self.advice if bad else None,
            seconds=round(anyio.current_time() - began, 3),
        )

    async def _outcome(self, subject: Subject) -> Outcome:
        if (reason := self.exempt(subject)) is not None:
            return not_applicable(reason)
        try:
            with anyio.fail_after(self.limit_s):
                return await self.check(subject)
        except TimeoutError:
            return failed(f"no result within {self.limit_s:.0f} s")
        except (SandboxError, GuestError, VmmError) as error:
            return failed(str(error))


def _attack(attack: Attack) -> Check:
    """Return the check that makes an attack in the shared sandbox."""

    async def check(subject: Subject) -> Outcome:
        return await subject.attack(attack)

    return check


BASICS = (
    Case("basics", "a sandbox starts", basics.start, BUG),
    Case("basics", "code runs, and its variables are kept", basics.run_code, BUG),
    Case("basics", "commands run, and their directory is kept", basics.run_commands, BUG),
    Case("basics", "a command that fails is a result", basics.fail, BUG),
    Case("basics", "a run ends at its time limit", basics.time_out, BUG),
    Case("basics", "files go in and come out unchanged", basics.exchange_files, BUG),
    Case("basics", "artifacts are reported and can be read", basics.find_artifacts, BUG),
    Case("basics", "a fork has the files of its original, and its own", basics.fork, BUG, _no_snapshots),
    Case("basics", "a paused sandbox continues", basics.pause, BUG, _no_snapshots),
    Case("basics", "a closed sandbox is gone", basics.close, BUG),
)

SECURITY = (
    Case("privileges", "code is an ordinary user without capabilities", _attack(privileges.hold_privileges)),
    Case("privileges", "code cannot become root", _attack(privileges.become_root)),
    Case("privileges", "no program gives code more privileges", _attack(privileges.gain_by_a_program), REBUILD),
    Case("privileges", "code cannot raise its limits", _attack(privileges.raise_limits)),
    Case(
        "privileges",
        "code cannot create a user namespace",
        _attack(privileges.create_user_namespace),
        REBUILD,
        _namespaces_allowed,
    ),
    Case(
        "privileges",
        "code cannot create other namespaces",
        _attack(privileges.create_other_namespaces),
        REBUILD,
        _namespaces_allowed,
    ),
    Case("privileges", "code cannot open raw sockets", _attack(privileges.open_raw_sockets)),
    Case("system calls", "code cannot change mounts", _attack(system_calls.mount)),
    Case("system calls", "code cannot load kernel code or reboot", _attack(system_calls.load_kernel_code)),
    Case("system calls", "code cannot set clock, host name or swap", _attack(system_calls.change_the_machine)),
    Case("system calls", "code cannot read the kernel's log", _attack(system_calls.read_kernel_log), REBUILD),
    Case("system calls", "code cannot use other architectures", _attack(system_calls.use_other_architectures), REBUILD),
    Case("system calls", "code cannot open files by handle", _attack(system_calls.open_by_handle)),
    Case("system calls", "code cannot use io_uring", _attack(system_calls.use_io_uring), REBUILD),
    Case(
        "system calls",
        "code cannot use bpf and performance counters",
        _attack(system_calls.use_bpf_and_counters),
        REBUILD,
    ),
    Case("system calls", "code cannot use the kernel's keys", _attack(system_calls.use_kernel_keys), REBUILD),
    Case("system calls", "code cannot use userfaultfd", _attack(system_calls.use_userfaultfd), REBUILD),
    Case("network", "a sandbox has only a loopback device", _attack(network.find_devices)),
    Case("network", "a sandbox has no route and no name server", _attack(network.find_routes)),
    Case("network", "names do not resolve", _attack(network.resolve_names)),
    Case("network", "code cannot reach the host", trespasses.reach_host),
    Case("network", "code cannot reach another sandbox", trespasses.reach_another),
    Case("host", "code sees no process of the host", trespasses.see_processes),
    Case("host", "code sees nothing of the server's environment", trespasses.see_environment),
    Case("host", "code finds no file of the host", trespasses.see_files),
    Case("host", "code does not learn the host's names", trespasses.learn_names),
    Case("host", "code can open only harmless devices", _attack(host.open_devices)),
    Case("host", "code cannot change what belongs to the machine", _attack(host.change_files)),
    Case("agent", "code cannot signal the agent", _attack(agent.signal_it), exempt=_one_user),
    Case("agent", "code cannot read the agent's memory", _attack(agent.read_memory)),
    Case("agent", "code learns nothing of the agent's state", _attack(agent.see_state), exempt=_shown_to_all),
    Case("agent", "code cannot trace the agent", _attack(agent.trace_it)),
    Case("agent", "code cannot open the agent's channel", _attack(agent.open_channel)),
    Case("agent", "code cannot change the agent's files", _attack(agent.change_files), exempt=_one_user),
    Case("agent", "killing every process ends only the code itself", bombs.kill_everything),
    Case("agent", "nonsense on its descriptors ends only the code itself", bombs.nonsense),
    Case("files", "file requests have no more access than code", trespasses.follow_links, exempt=_one_user),
    Case("files", "long output does not follow links", trespasses.spill_through_links),
    Case("files", "no artifact is outside its directory", trespasses.artifacts_elsewhere),
    Case("files", "a bad file request does not end the sandbox", trespasses.bad_file_requests),
    Case("files", "deep directories do not end the sandbox", trespasses.deep_directories),
    Case("sandboxes", "a sandbox does not see another's files", trespasses.see_another),
    Case("sandboxes", "every sandbox is unique", trespasses.unique),
    Case("sandboxes", "every fork is unique", trespasses.unique_forks, exempt=_no_snapshots),
    Case("limits", "a fork bomb ends with its run, and the sandbox goes on", bombs.fork_bomb, LIMITS),
    Case("limits", "as many processes as allowed do not end the sandbox", bombs.many_processes, LIMITS),
    Case("limits", "a memory bomb is stopped, and the sandbox goes on", bombs.memory_bomb, LIMITS),
    Case("limits", "shared memory is limited, and the sandbox goes on", bombs.shared_memory_bomb, LIMITS),
    Case("limits", "memory of the kernel is limited", bombs.socket_bomb, LIMITS),
    Case("limits", "a full disk is an error, and the sandbox goes on", bombs.full_disk, LIMITS),
    Case("limits", "a flood of output is cut, and the sandbox goes on", bombs.flood, LIMITS),
    Case("limits", "a run that ignores interrupts ends at its time limit", bombs.endless_run, LIMITS),
)
