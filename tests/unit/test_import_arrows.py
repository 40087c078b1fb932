"""DESIGN's arrows: which room may import which."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "vmm": set(),
    "guest": set(),
    "templates": {"vmm", "guest"},
    "websearch": {"templates", "vmm", "guest"},
    "mcp_sandbox": {"websearch", "templates", "vmm", "guest"},
}
# The folders of mcp_sandbox, lowest first.
FOLDERS = {
    "views": set[str](),
    "machines": set[str](),
    "runs": {"views"},
    "sandboxes": {"views", "machines", "runs"},
    "operating": {"views", "machines", "sandboxes"},
    "tools": {"views", "machines", "runs", "sandboxes"},
    "serving": {"operating", "sandboxes", "tools"},
}
ROOMS = [room for room in MAY_IMPORT if (ROOT / room).is_dir()]
# What runs inside a machine has nothing but Python's standard library there, and IPython in the Python kernel.
HOST_SIDE = "client"
KERNEL_LIBRARIES = {"IPython", "matplotlib", "matplotlib_inline", "traitlets"}


def imports(file: Path) -> set[str]:
    """The top-level names of everything a file imports, however late."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[room] - {room}
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / room).rglob("*.py")
        for name in imports(file) & forbidden
    }
    assert wrong == set()


def folders(file: Path) -> set[str]:
    """The folders of mcp_sandbox that a file imports from."""
    text = file.read_text()
    return set(re.findall(r"^\s*(?:from|import) mcp_sandbox\.(\w+)", text, re.MULTILINE)) & set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_the_product_imports_only_what_is_below_it(folder):
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / "mcp_sandbox" / folder).rglob("*.py")
        for name in folders(file) - FOLDERS[folder] - {folder}
    }
    assert wrong == set()


def test_code_that_runs_in_a_machine_needs_only_the_standard_library():
    allowed = sys.stdlib_module_names | {"guest"}
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / "guest").rglob("*.py")
        if file.parent.name != HOST_SIDE
        for name in imports(file) - allowed - (KERNEL_LIBRARIES if file.parent.name == "kernels" else set())
    }
    assert wrong == set()
