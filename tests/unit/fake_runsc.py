"""A script that says about itself what a release of gVisor says. It runs no machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Options = Mapping[str, Sequence[str]]  # by the arguments that list them

OF_2022: Options = {"help checkpoint": ("image-path", "leave-running"), "help restore": ("detach",)}
OF_2024: Options = {
    "help checkpoint": ("compression", "direct", "exclude-committed-zero-pages", "image-path"),
    "help restore": ("bundle", "detach", "direct"),
    "flags": ("network", "platform"),
}
NEW: Options = {
    "help checkpoint": OF_2024["help checkpoint"],
    "help restore": ("background", "bundle", "detach", "direct"),
    "flags": ("network", "platform", "restore-spec-validation"),
}


def fake_runsc(directory: Path, version: str = "0.0~20240729.0", options: Options = OF_2024) -> Path:
    """Write the script to a directory; it ends with 1 if it is to run something."""
    directory.mkdir(exist_ok=True)
    program = directory / "runsc"
    printed = {
        arguments: "\n".join(f"  -{name} value\n    \thelp" for name in names) for arguments, names in options.items()
    }
    printed["--version"] = f"runsc version {version}\nspec: 1.2.0"
    cases = [f"'{arguments}') cat <<'END'\n{text}\nEND\n;;" for arguments, text in printed.items()]
    program.write_text(
        "\n".join(["#!/bin/sh", "PATH=/usr/bin:/bin", 'case "$*" in', *cases, "*) exit 1;;", "esac", ""])
    )
    program.chmod(0o755)
    return program
