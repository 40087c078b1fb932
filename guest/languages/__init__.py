"""The languages that sandboxes run, one module for each. To add one, add its module here and a template.

A module defines `LANGUAGE`, the facts that the host and the agent need, and `kernel()`, which returns what runs its
code. Modules use the standard library only, so that both sides can read the facts.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH208

import os
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

NAMES = tuple(sorted(name[:-3] for name in os.listdir(__path__[0]) if name.endswith(".py") and name[0] != "_"))

if TYPE_CHECKING:
    LanguageName = str
else:
    LanguageName = Literal[NAMES]  # a Literal of every name


class Language(NamedTuple):
    """Facts about a language."""

    title: str  # as people write it
    template: str  # the built-in one
    image: str  # of a registry, for new templates
    suffixes: tuple[str, ...] = ()  # of files with its code
    memory_mb: int = 1024  # of machines of new templates
    version: tuple[str, ...] = ()  # a command that prints it; () is the version of the agent's Python
    warm_cells: tuple[str, ...] = ()  # run once before the snapshot, so that later runs find their pages in memory
    rehearsal: str | None = ""  # stands for an owner's first run; None: its kernel would keep what such code leaves
    settling_code: str = ""  # without any effect, run after a refresh that starts a new interpreter
    stateful: bool = False  # variables last from run to run
    compiled: bool = False  # each run is a program with test cases, flags and limits
    sanitizers: tuple[str, ...] = ()
    output_flag: str = "-o"  # a pattern of flags that set where a compiler puts the program
    in_process: bool = False  # code runs in the kernel's own process: see `User.soft_limits`


class Kernel(Protocol):
    """What runs the code of a language, in a process that the zygote makes for it."""

    def prepare(self) -> None:
        """Import and build everything a kernel needs, once, before the first fork."""

    def warm(self, code: str) -> None:
        """Run warm-up code; whatever it raises is reported to the template's author."""

    def serve(self, control_fd: int, figures: int) -> None:
        """Run code as the kernel of this process until the agent is gone."""


class _Module(Protocol):
    LANGUAGE: Language

    def kernel(self) -> Kernel: ...


def language(name: str) -> Language:
    """Return the facts about a language. Raises ImportError if there is none of this name."""
    return _module(name).LANGUAGE


def kernel(name: str) -> Kernel:
    """Return what runs a language's code."""
    return _module(name).kernel()


def _module(name: str) -> _Module:
    return cast("_Module", import_module(f"guest.languages.{name}"))
