"""What a client asks a sandbox to run: code, a shell command, or a call of a handler.

Each type checks itself, first without a template, then against the one it would run in.
`CheckedRun.message` turns any of them into what the guest's agent gets.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar

import anyio
from pydantic import BeforeValidator, Field

from guest.client.messages import RunCode, RunKind
from guest.client.reports import MAX_CASES
from guest.languages import NAMES, language
from guest.protocol import MAX_BODY, encode_json
from mcp_sandbox.config import OutputSettings, RunSettings
from mcp_sandbox.errors import BadRequest, InputTooLarge, WrongLanguage
from templates.model import Template

INTERRUPT_GRACE_S = 2.0  # what an interrupted run gets to end by itself before its kernel is killed

SANITIZERS = ("address", "undefined", "thread")  # of all languages together
MAX_FLAGS = 50
MAX_FLAG_CHARS = 200
MIN_MEMORY_MB = 32  # a program's peak is never measured below that of the process that starts it, 20 MB

MAX_PATH_BYTES = 4096  # of a directory, as Linux has it
MAX_VARIABLES = 1000
MAX_ENV_BYTES = 64 * 1024  # of all names and values; they reach the shell as one argument
COMMAND_BYTES = 128 * 1024  # reserved in the message for the command itself
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

OPEN_OR_GIVEN = "Give stdin (or cases) or stdin_open, not both: an open stdin starts empty."

HANDLER_LIMITS_BYTES = 100  # reserved for the limits that `HandlerRun.guest_options` adds


def _few(variables: object) -> object:
    if isinstance(variables, dict) and len(variables) > MAX_VARIABLES:
        raise ValueError(f"at most {MAX_VARIABLES:,} variables")
    return variables


# They are counted before each one is checked.
Variables = Annotated[dict[str, str], Field(max_length=MAX_VARIABLES), BeforeValidator(_few)]


@dataclass(frozen=True, slots=True)
class RunRequest(ABC):
    """What all requests have in common. Without a sandbox_id, the run gets a fresh sandbox that ends with it."""

    kind: ClassVar[RunKind]
    noun: ClassVar[str] = "code"

    owner: str
    source: str  # the code or the command
    sandbox_id: str | None = None
    template: str | None = None  # of the fresh sandbox; None: the default one
    timeout_s: float | None = None
    _: KW_ONLY
    keep_processes: bool = False  # those that it leaves running outlive it
    stdin_open: bool = False  # it reads what is sent while it is active

    def check(self, limits: RunSettings) -> None:
        """Check everything that does not depend on a template.

        Raises:
            BadRequest: no sandbox could run it.
        """
        self._check_source(limits)
        if "\0" in self.source:
            raise BadRequest(f"The {self.noun} contains a null byte. Remove it.")
        if len(self.source.encode(errors="replace")) > limits.max_code_bytes:
            raise InputTooLarge(f"The {self.noun} has more than {limits.max_code_bytes:,} bytes.")
        if self.sandbox_id is not None and self.template is not None:
            raise BadRequest("Give sandbox_id or template, not both: a sandbox keeps its template.")

    @abstractmethod
    def check_template(self, template: Template) -> None:
        """Check that sandboxes of `template` can run it.

        Raises:
            BadRequest: they cannot.
        """

    @abstractmethod
    def options(self) -> dict[str, Any] | None:
        """Return what accompanies the source, as JSON; None is the fastest for the guest."""

    def guest_options(self, template: Template, timeout_s: float) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the options for a run in a sandbox of `template`."""
        return self.options()

    def _check_source(self, limits: RunSettings) -> None:  # noqa: ARG002
        if not self.source.strip():
            raise BadRequest(f"The {self.noun} is empty. Give the {self.noun} to run.")


@dataclass(frozen=True, slots=True)
class Case:
    """A test case: one execution of a compiled program."""

    stdin: str = ""
    expected: str | None = None

    def as_json(self) -> dict[str, str]:
        """Return the case without an expected output that was not given."""
        return {"stdin": self.stdin} if self.expected is None else {"stdin": self.stdin, "expected": self.expected}


@dataclass(frozen=True, slots=True)
class CodeRun(RunRequest):
    """Code in the language of the template. All options but `stdin` need a compiled language."""

    kind = "code"

    _: KW_ONLY
    stdin: str | None = None
    cases: tuple[Case, ...] | None = None
    case_timeout_s: float | None = None
    memory_limit_mb: int | None = None
    flags: tuple[str, ...] | None = None
    sanitize: tuple[str, ...] | None = None

    def options(self) -> dict[str, Any] | None:
        """Return the options that were given; None if there are none."""
        given = {
            "stdin": self.stdin,
            "cases": None if self.cases is None else [case.as_json() for case in self.cases],
            "case_timeout_s": self.case_timeout_s,
            "memory_limit_mb": self.memory_limit_mb,
            "flags": None if self.flags is None else list(self.flags),
            "sanitize": None if self.sanitize is None else list(self.sanitize),
        }
        return {name: value for name, value in given.items() if value is not None} or None

    def check_template(self, template: Template) -> None:
        """Check that the template's language supports the options."""
        facts = language(template.language)
        if self.keep_processes and facts.compiled:
            raise WrongLanguage(
                f"keep_processes is for interpreters and commands: a {facts.title} program ends with all its "
                "processes. Start it with run_command."
            )
        options = self.options()
        if self.stdin_open and (self.stdin is not None or self.cases is not None):
            raise BadRequest(OPEN_OR_GIVEN)
        if options is None:
            return
        if not facts.compiled and (wrong := options.keys() - {"stdin"}):
            raise WrongLanguage(
                f"{' and '.join(sorted(wrong))} can only be used with compiled languages, and template "
                f"{template.name} is for {facts.title}. Templates such as {_templates_that_compile()} support it."
            )
        self._check_cases()
        self._check_memory_limit(template)
        self._check_flags(template)
        self._check_sanitizers(template)
        size = len(self.source.encode(errors="replace")) + len(encode_json(options))
        if size > MAX_BODY:
            raise InputTooLarge(
                f"Code, input and expected output have {size:,} bytes together; at most {MAX_BODY:,} are possible. "
                "Use fewer cases at once."
            )

    def _check_cases(self) -> None:
        if self.cases is None:
            if self.case_timeout_s is not None:
                raise BadRequest("case_timeout_s needs cases. The time of a single run is limited by timeout_s.")
            return
        if self.stdin is not None:
            raise BadRequest("Give stdin or cases, not both: every case has its own stdin.")
        if not 1 <= len(self.cases) <= MAX_CASES:
            raise BadRequest(f"There are {len(self.cases)} cases; give 1 to {MAX_CASES} at once.")

    def _check_memory_limit(self, template: Template) -> None:
        most = template.machine.memory_mb
        if self.memory_limit_mb is not None and not MIN_MEMORY_MB <= self.memory_limit_mb <= most:
            raise BadRequest(
                f"memory_limit_mb must be {MIN_MEMORY_MB} to {most}: a sandbox of this template has {most}."
            )

    def _check_flags(self, template: Template) -> None:
        flags = self.flags or ()
        if len(flags) > MAX_FLAGS:
            raise BadRequest(f"There are {len(flags)} flags; at most {MAX_FLAGS} are allowed.")
        for flag in flags:
            if not (flag.startswith("-") and flag.isprintable() and 1 < len(flag) <= MAX_FLAG_CHARS):
                raise BadRequest(
                    f"{flag[:60]!r} is not a flag. Each flag is a separate string that begins with '-', such as '-O3', "
                    f"and has at most {MAX_FLAG_CHARS} characters."
                )
            if re.match(language(template.language).output_flag, flag):
                raise BadRequest(f"Leave out the flag {flag}: the location of the program is fixed.")

    def _check_sanitizers(self, template: Template) -> None:
        if self.sanitize is None:
            return
        facts = language(template.language)
        if not facts.sanitizers:
            raise WrongLanguage(f"There are no sanitizers for {facts.title}. Leave out sanitize.")
        names = set(self.sanitize)
        if not names or names - set(facts.sanitizers):
            raise BadRequest(f"For {facts.title}, sanitize is a list of {', '.join(facts.sanitizers)}.")
        if {"address", "thread"} <= names:
            raise BadRequest("The sanitizers address and thread exclude each other: use one per run.")


@dataclass(frozen=True, slots=True)
class CommandRun(RunRequest):
    """A shell command, or a whole script."""

    kind = "command"
    noun = "command"

    _: KW_ONLY
    cwd: str | None = None  # None: where the last command ended
    env: Mapping[str, str] | None = None  # for this command only
    stdin: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that were given."""
        options: dict[str, Any] = {}
        if self.cwd is not None:
            options["cwd"] = _encodable(self.cwd)
        if self.env:
            options["env"] = {name: _encodable(value) for name, value in self.env.items()}
        if self.stdin is not None:
            options["stdin"] = _encodable(self.stdin)
        return options

    def check(self, limits: RunSettings) -> None:
        """Check the command and its options."""
        RunRequest.check(self, limits)
        cwd = self.cwd
        if cwd is not None and (not cwd or "\0" in cwd or len(cwd.encode(errors="replace")) > MAX_PATH_BYTES):
            raise BadRequest(
                "cwd must be a directory in the sandbox, absolute or relative to where the last command ended."
            )
        self._check_env(self.env or {})
        if self.stdin_open and self.stdin is not None:
            raise BadRequest(OPEN_OR_GIVEN)
        if len(encode_json(self.options())) > MAX_BODY - COMMAND_BYTES:
            raise InputTooLarge("stdin is too long.")

    def check_template(self, template: Template) -> None:
        """Accept every template. Its agent refuses the command if there is no shell."""

    def _check_env(self, env: Mapping[str, str]) -> None:
        for name, value in env.items():
            if not ENV_NAME.fullmatch(name):
                raise BadRequest(f"env: {name[:60]!r} is not a variable name: use letters, digits and _.")
            if "\0" in value:
                raise BadRequest(f"env: the value of {name[:60]} contains a null byte. Remove it.")
        if sum(len(name) + len(value.encode(errors="replace")) for name, value in env.items()) > MAX_ENV_BYTES:
            raise InputTooLarge(f"env has more than {MAX_ENV_BYTES:,} bytes.")


@dataclass(frozen=True, slots=True)
class HandlerRun(RunRequest):
    """Python code, then a call of the function `handler(event, context)` that it or an earlier run defined."""

    kind = "invoke"

    _: KW_ONLY
    event: object  # JSON
    context: Mapping[str, object] | None = None  # JSON: attributes of the handler's context
    handler: str = "handler"

    def options(self) -> dict[str, Any]:
        """Return the call."""
        return {"handler": self.handler, "event": self.event, "context": dict(self.context or {})}

    def guest_options(self, template: Template, timeout_s: float) -> dict[str, Any]:
        """Return the call and the limits that the handler can read from its context."""
        return {**self.options(), "timeout_s": timeout_s, "memory_mb": template.machine.memory_mb}

    def check_template(self, template: Template) -> None:
        """Check that the template is for Python."""
        if template.language != "python":
            raise WrongLanguage(f"Only Python has handlers, and template {template.name!r} is for {template.language}.")

    def _check_source(self, limits: RunSettings) -> None:
        if not self.source.strip() and self.sandbox_id is None:
            raise BadRequest(
                "The code is empty. Give the source that defines the handler, or the sandbox_id of a sandbox where an "
                "earlier run defined it."
            )
        if not self.handler.isidentifier():
            raise BadRequest("handler must be the name of a function that the code defines, such as 'handler'.")
        try:
            data = encode_json(self.options())
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"event and context must be JSON: {error}.") from None
        most = limits.max_code_bytes
        if len(self.source.encode(errors="replace")) + len(data) + HANDLER_LIMITS_BYTES > most:
            raise InputTooLarge(f"Code, event and context have more than {most:,} bytes together.")


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A request that a sandbox can run, and when it was made."""

    request: RunRequest
    timeout_s: float
    asked_at: float

    @property
    def fresh(self) -> bool:
        """Whether its sandbox is created for it."""
        return self.request.sandbox_id is None

    def message(self, template: Template, output: OutputSettings) -> RunCode:
        """Return what the agent of a sandbox of `template` gets."""
        request = self.request
        return RunCode(
            request.source,
            kind=request.kind,
            options=request.guest_options(template, self.timeout_s),
            grace_s=INTERRUPT_GRACE_S,
            head_bytes=output.live_bytes,
            tail_bytes=output.tail_bytes,
            keep_processes=request.keep_processes,
            stdin_open=request.stdin_open,
        )


def check_request(request: RunRequest, limits: RunSettings, default_timeout_s: float) -> CheckedRun:
    """Check a request and fill in its timeout.

    Raises:
        BadRequest: no sandbox could run it.
    """
    request.check(limits)
    timeout_s = default_timeout_s if request.timeout_s is None else request.timeout_s
    if not 0 < timeout_s <= limits.max_timeout_s:
        raise BadRequest(f"The timeout must be greater than 0 and at most {limits.max_timeout_s:g} s.")
    return CheckedRun(request, timeout_s, anyio.current_time())


def _templates_that_compile() -> str:
    names = [facts.template for facts in map(language, NAMES) if facts.compiled]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates replaced, so that it can be encoded as UTF-8."""
    return text.encode(errors="replace").decode()
