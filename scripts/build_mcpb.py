"""build_mcpb.py [DIRECTORY]: pack this checkout into an .mcpb bundle for desktop clients, in DIRECTORY or dist."""

import json
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TOP = ("pyproject.toml", "README.md", "LICENSE")  # what the build of the package needs besides the code


def files(project: dict[str, object]) -> Iterator[Path]:
    """Yield the files of a bundle: the packages of the wheel, and what builds it."""
    yield from (REPO / name for name in TOP)
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:  # type: ignore[index]
        found = sorted((REPO / package).rglob("*"))
        yield from (path for path in found if path.is_file() and "__pycache__" not in path.parts)


def build(directory: Path) -> Path:
    """Write the bundle, and return where it is."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    manifest = REPO / "mcpb" / "manifest.json"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"mcp-sandbox-{json.loads(manifest.read_text())['version']}.mcpb"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.write(manifest, "manifest.json")
        for path in files(project):
            bundle.write(path, path.relative_to(REPO))
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "dist"))  # noqa: T201 - what it has made
