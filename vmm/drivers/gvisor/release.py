"""What a runsc is able to do, asked of the program itself: builds from source do not even have a release date."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import anyio.to_thread

from vmm.probe import version_output

# The options that we use if a release has them, by the command that has them, and their values.
USED: Mapping[str, Mapping[str, str]] = {
    "checkpoint": {
        "compression": "none",  # unpacking would take longer in every restore than reading does
        "exclude-committed-zero-pages": "true",
    },
    # The machine runs while its memory is still read; a page that it touches is read first.
    "restore": {"background": "true"},
    # Our config differs in the image's descriptor, and in the machine's size if the caller wants another one.
    "flags": {"restore-spec-validation": "ignore"},
}
NEEDED = tuple(f"checkpoint --{name}" for name in USED["checkpoint"])  # releases without them lose some checkpoints
QUESTIONS = {"checkpoint": ("help", "checkpoint"), "restore": ("help", "restore"), "flags": ("flags",)}
DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class Release:
    """A runsc: its version, and which of the options that we use it has, written like `restore --background`."""

    version: str
    options: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the options that we need and that this release does not have."""
        return tuple(option for option in NEEDED if option not in self.options)

    def arguments(self, command: str) -> list[str]:
        """Return the options to give to a command, or to all of them if it is `flags`."""
        return [f"--{name}={value}" for name, value in USED[command].items() if _spelled(command, name) in self.options]

    def dump(self) -> str:
        """Return it as text, for the cache."""
        return "\n".join((self.version, *self.options))

    @classmethod
    def parse(cls, text: str) -> "Release":
        """Return the release that `dump` was called on."""
        version, *options = text.splitlines()
        return cls(version, tuple(options))


async def ask(program: int) -> Release | None:
    """Return what the runsc behind an open file is; None if it does not run."""
    path, printed = f"/proc/self/fd/{program}", dict[str, str]()

    async def run(question: str, *arguments: str) -> None:
        printed[question] = await version_output(path, *arguments, pass_fds=[program])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "version", "--version")
        for command, arguments in QUESTIONS.items():
            tasks.start_soon(run, command, *arguments)
    if "runsc" not in printed["version"]:
        return None
    version = date_in(printed["version"]) or await anyio.to_thread.run_sync(_digest, program)
    return Release(f"runsc {version}", tuple(_options(printed)))


def date_in(version: str) -> str | None:
    """Return the release date in the output of `runsc --version`, such as 20240729."""
    found = re.search(r"(?<!\d)20\d{6}(?!\d)", version)
    return found[0] if found else None


def _options(printed: Mapping[str, str]) -> list[str]:
    """Return those options that we use and that are in the help texts."""
    listed = {command: set(re.findall(r"^\s+-([\w-]+)", printed[command], re.MULTILINE)) for command in USED}
    return [_spelled(command, name) for command, names in USED.items() for name in names if name in listed[command]]


def _spelled(command: str, option: str) -> str:
    return f"--{option}" if command == "flags" else f"{command} --{option}"


def _digest(program: int) -> str:
    """Return a name for a build without a date. Snapshots of another build must not be taken for its own."""
    with open(program, "rb", closefd=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"of unknown release (SHA-256 {digest[:DIGEST_CHARS]}…)"
