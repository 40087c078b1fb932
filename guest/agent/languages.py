"""What the agent needs to know about each language; `guest/kernels/<language>.py` has the rest."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from guest.agent.python_check import python_for

# Run once before the snapshot, so that later runs find their pages in memory.
WARM_CELLS: Mapping[str, tuple[str, ...]] = {
    "python": ("1+1", "print(1)", "1/0", "del _"),
    "shell": ("true",),
    "cpp": (
        "#include <bits/stdc++.h>\nint main() { std::vector<int> v{2, 1}; std::sort(v.begin(), v.end());"
        ' std::cout << v[0] << "\\n"; }',
        "int main() { return }",
    ),
    "go": (
        'package main\nimport ("bufio"; "fmt"; "os"; "sort"; "strings")\nfunc main() { v := []int{2, 1}; sort.Ints(v);'
        " w := bufio.NewWriter(os.Stdout); defer w.Flush(); fmt.Fprintln(w, v, strings.ToUpper(`a`)) }",
        "func main() { return 1 }",
    ),
}
# Their kernels watch the memory of what they run, see `User.drop_privileges`.
MEMORY_WATCHERS = frozenset({"cpp", "go"})
_VERSION_COMMANDS = {"cpp": ("g++", "-dumpfullversion"), "go": ("go", "env", "GOVERSION")}
_VERSION_TIMEOUT_S = 60.0  # on an emulated CPU


def version_of(language: str) -> str:
    """Return the version of a language in this machine."""
    command = _VERSION_COMMANDS.get(language)
    if language == "python" and not Path(python := python_for(language)[0]).samefile(sys.executable):
        command = (python, "-c", "import platform; print(platform.python_version())")
    if command is None:
        return platform.python_version()
    import subprocess  # not needed for the agent's own Python

    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.strip().removeprefix("go")
