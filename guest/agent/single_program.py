"""Recognizes command lines that are one program, which a shell can become: gVisor takes long to fork.

What such a line can change dies with its program, so the session stays as it is. In doubt a line is not recognized.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH113, PTH118

import os
import string

PLAIN = frozenset(string.ascii_letters + string.digits + "_./+-")  # in the name of a program
COMPOUND = frozenset(";&|()`\n")  # in a line with more than one command, or wherever else they have no meaning
_BASH = """
    . : [ alias bg bind break builtin caller cd command compgen complete compopt continue declare dirs disown echo
    enable eval exec exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf
    pushd pwd read readarray readonly return set shift shopt source suspend test times trap true type typeset ulimit
    umask unalias unset wait case coproc do done elif else esac fi for function if in select then time until while
"""
BUILT_IN = frozenset(_BASH.split())  # and words with a meaning; dash has no others


def is_single_program(line: str, folder: str, path: str) -> bool:
    """Return whether a line is one program that can be executed in `folder`, with `path` as the PATH."""
    name = line.lstrip(" ").partition(" ")[0]
    if not name or name[0] == "-" or name in BUILT_IN or not PLAIN.issuperset(name) or not COMPOUND.isdisjoint(line):
        return False
    if "/" in name:
        return _is_executable(os.path.join(folder, name))
    return any(_is_executable(f"{place}/{name}") for place in path.split(":") if place.startswith("/"))


def _is_executable(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK, effective_ids=True)
