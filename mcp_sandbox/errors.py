"""Everything that can go wrong with a sandbox, said so that the caller knows what to do next.

SandboxError
├── NotFound           no sandbox of this owner has that id
│   ├── Closed         it was closed; its files are gone
│   └── Expired        it was idle for too long or reached its greatest age
├── RunNotFound        the sandbox has no such run, or no longer its result
├── Busy               another run is on in the sandbox
├── Paused             the sandbox has no machine until it is resumed
├── CannotFreeze       machines of this driver cannot be forked or paused
├── StateLost          the frozen state of a machine cannot be read any more
├── MachineLost        its machine ended while it was in use; state and files are gone
├── RunLost            the machine of a one-off run ended before there was a result
│   └── NotSent        and before it was given any code
├── TemplateNotBuilt   the template has no snapshot for this host yet
├── UnknownTemplate    there is no template of that name
├── UnusableTemplate   its template.toml has mistakes
├── HostNotReady       this host cannot run machines as configured
├── DiskFull           there is no room on the host's disk
├── TooWeak            the driver that was named isolates less than the settings demand
├── LimitReached       one of the limits in the settings says no
├── BadRequest         an argument is wrong
└── FileProblem        a file in the sandbox cannot be read or written as asked
"""

NEXT_CREATE = "Call create_sandbox to get a new one."


class SandboxError(Exception):
    """Base of all errors this room raises. The message is written for the caller, next step included."""


class NotFound(SandboxError):
    """There is no such sandbox, or it belongs to somebody else: nobody can tell which."""

    def __init__(self, sandbox_id: str, what: str = "does not exist") -> None:
        super().__init__(f"Sandbox {sandbox_id!r} {what}. {NEXT_CREATE}")


class Closed(NotFound):
    """The sandbox was closed: by its owner, if nothing else is said."""

    def __init__(self, sandbox_id: str, why: str = "") -> None:
        super().__init__(sandbox_id, f"was closed{f' ({why})' if why else ''}; its variables and files are gone")


class Expired(NotFound):
    """The sandbox ran out of time."""

    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(sandbox_id, f"expired: {why}; its variables and files are gone")


class RunNotFound(SandboxError):
    """There is no such run, or nothing is known of it any more."""

    def __init__(self, sandbox_id: str, run_id: str, kept_runs: int | None) -> None:
        if kept_runs is None:
            what = f"Sandbox {sandbox_id!r} has no run {run_id!r}. Give a run_id that run_code returned for it."
        else:
            what = (
                f"The result of {run_id!r} in sandbox {sandbox_id!r} is not kept any more: only the last {kept_runs} "
                "of background runs are, if they are not too large. Files it left are still there; or run it again."
            )
        super().__init__(what)


class Busy(SandboxError):
    """A sandbox runs one thing at a time."""

    def __init__(self, sandbox_id: str, run_id: str | None = None, elapsed_s: float = 0.0) -> None:
        advice = "It is being forked, paused or resumed; try again in a second."
        if run_id is not None:
            names = f'(sandbox_id="{sandbox_id}", run_id="{run_id}")'
            advice = (
                f"{run_id} has been running for {elapsed_s:.0f} s. Wait for it with read_output{names}, "
                f"end it with stop_run{names}, or use another sandbox."
            )
        super().__init__(f"Sandbox {sandbox_id!r} is busy. {advice}")


class Paused(SandboxError):
    """A sandbox without a machine cannot be used."""

    def __init__(self, sandbox_id: str) -> None:
        super().__init__(f'Sandbox {sandbox_id!r} is paused. Call resume_sandbox(sandbox_id="{sandbox_id}") first.')


class CannotFreeze(SandboxError):
    """The driver in force takes no snapshots."""

    def __init__(self, driver: str) -> None:
        super().__init__(
            f"Driver {driver} takes no snapshots, so its sandboxes cannot be forked or paused. "
            "Create the sandboxes you need with create_sandbox."
        )


class StateLost(SandboxError):
    """What a machine was frozen into is gone or damaged."""


class MachineLost(SandboxError):
    """The machine under a sandbox ended by itself, or stopped making sense."""

    def __init__(self, sandbox_id: str, reason: str, run_id: str | None = None) -> None:
        super().__init__(
            f"Sandbox {sandbox_id!r} lost its machine ({reason}). Its variables and files are gone. {NEXT_CREATE}"
            + _last_words(sandbox_id, run_id)
        )


class RunLost(SandboxError):
    """The machine of a one-off run ended by itself. Nobody had anything else in it."""

    def __init__(self, sandbox_id: str, reason: str, run_id: str | None = None) -> None:
        super().__init__(
            f"The run has no result: its machine ended ({reason}). Run the code again; if it ends like this once more, "
            f"it may need more memory than there is.{_last_words(sandbox_id, run_id)}"
        )


class NotSent(RunLost):
    """It ended before it was given any code, so running the code again repeats nothing."""


def _last_words(sandbox_id: str, run_id: str | None) -> str:
    if run_id is None:
        return ""
    call = f'read_output(sandbox_id="{sandbox_id}", run_id="{run_id}")'
    return f" What {run_id} had written can be read for a while: {call}."


class TemplateNotBuilt(SandboxError):
    """The template is known, but nothing can be started from it yet."""

    def __init__(self, template: str) -> None:
        super().__init__(
            f"Template {template!r} is not built on this host. "
            f"Run `mcp-sandbox template build {template}` in a terminal, then try again."
        )


class UnknownTemplate(SandboxError):
    """Nobody defined a template of that name."""

    def __init__(self, template: str, known: list[str]) -> None:
        super().__init__(f"There is no template {template!r}. Choose one of: {', '.join(known) or '(none)'}.")


class UnusableTemplate(SandboxError):
    """The template's definition has mistakes; the message has a line for each."""

    def __init__(self, template: str, problem: str) -> None:
        super().__init__(f"Template {template!r} cannot be used until its definition is mended:\n{problem}")


class HostNotReady(SandboxError):
    """The host cannot run machines; the message carries the fix when there is one."""

    def __init__(self, reason: str, fix: str | None = None) -> None:
        advice = f" To fix it: {fix}." if fix else ""
        super().__init__(f"This host cannot start sandboxes: {reason}.{advice} `mcp-sandbox doctor` tells more.")


class DiskFull(SandboxError):
    """There is no room on the host's disk, or in its memory where that stands in for one."""

    def __init__(self, done: str) -> None:
        super().__init__(
            f"The sandbox could not be {done}: the server's disk is full. Resume or close a paused sandbox "
            "(list_sandboxes names them), or ask the operator to make room."
        )


class TooWeak(SandboxError):
    """Two settings contradict each other, and the safer one wins."""

    def __init__(self, driver: str, isolation: str, least: str) -> None:
        super().__init__(
            f"driver = {driver} gives isolation level {isolation} only, and min_isolation = {least} refuses that. "
            "Set driver to auto or to a stronger one, or lower min_isolation."
        )


class LimitReached(SandboxError):
    """A limit of the settings is used up."""

    def __init__(self, setting: str, value: float, advice: str) -> None:
        super().__init__(f"Limit {setting} = {value} is reached. {advice}")


class BadRequest(SandboxError):
    """The request itself is wrong and was not carried out."""


class FileProblem(SandboxError):
    """A file or directory in the sandbox is not what the caller took it for."""


def first_of(error: BaseException) -> BaseException:
    """The error itself where task groups have wrapped it, or the first of several; the caller keeps the group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
