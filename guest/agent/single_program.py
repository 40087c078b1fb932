"""Recognizes command lines that are one small program, which a shell can become: gVisor takes long to fork.

Only programs that start no others and leave sessions and process groups alone: they lead both, as the shell does, and
orphans in the machine become their children. In doubt a line is not recognized.
"""

import os

PROGRAMS = frozenset(
    [
        *("ls", "cat", "head", "tail", "wc", "grep", "stat", "du", "df", "file", "tree", "ps", "free", "uname", "id"),
        *("mkdir", "rm", "cp", "mv", "touch", "chmod", "ln", "diff", "sort", "uniq", "cut", "jq", "md5sum"),
    ]
)
# In lines with more than one command, or that could change variables; and in some that could not.
COMPOUND = frozenset(";&|()`{[\n")
PLACES = ("/usr/bin/", "/bin/")


def is_single_program(line: str, path: str) -> bool:
    """Return whether a line is one of these programs with its arguments, and `path`, the PATH, has no other first."""
    name = line.lstrip(" ").partition(" ")[0]
    if name not in PROGRAMS or not COMPOUND.isdisjoint(line) or "BASH_ENV" in os.environ:
        return False
    for place in path.split(":"):
        if os.access(f"{place}/{name}", os.X_OK):
            return f"{place}/" in PLACES
    return False
