"""DESIGN's arrows: which room may import which."""

import ast
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
# The folders and modules of mcp_sandbox, lowest first.
EVERYWHERE = {"errors", "config", "logs"}
PARTS = {
    "errors": set[str](),
    "config": set[str](),
    "logs": set[str](),
    "late_models": set[str](),
    "private": set[str](),
    "views": {"errors"},
    "web": {"views"} | EVERYWHERE,
    "machines": EVERYWHERE,
    "runs": {"views"} | EVERYWHERE,
    "sandboxes": {"views", "machines", "runs", "web"} | EVERYWHERE,
    "operating": {"views", "machines", "sandboxes"} | EVERYWHERE,
    "accounts": {"operating", "sandboxes"} | EVERYWHERE,
    "app": {"machines", "sandboxes", "operating", "web"} | EVERYWHERE,
    "tools": {"views", "machines", "runs", "sandboxes", "accounts", "web"} | EVERYWHERE,
    "rest": {"views", "runs", "sandboxes", "accounts", "web"} | EVERYWHERE,
    "sdk": {"views", "rest", "app"} | EVERYWHERE,
    "serving": {"views", "accounts", "operating", "sandboxes", "tools", "rest", "app", "late_models"} | EVERYWHERE,
    "commands": {
        "views",
        "machines",
        "runs",
        "sandboxes",
        "operating",
        "accounts",
        "web",
        "app",
        "serving",
        "private",
        "connect",
    }
    | EVERYWHERE,
    "connect": set[str](),  # it starts in a moment, so it imports the standard library only
    "stdio_command": {"commands", "connect", "serving"} | EVERYWHERE,
    "cli_base": {"stdio_command"} | EVERYWHERE,
    "cli_sandbox": {"cli_base", "commands", "stdio_command"},
    "cli": {"cli_base", "cli_sandbox", "commands", "serving", "stdio_command", "web"} | EVERYWHERE,
    "start": {"cli", "connect", "private", "stdio_command"},
    "__main__": {"start"},
}
IN_SANDBOXES = ROOT / "mcp_sandbox" / "commands" / "selftest" / "inside"
ROOMS = [room for room in MAY_IMPORT if (ROOT / room).is_dir()]
# What runs inside a machine has nothing but Python's standard library there, IPython in the Python kernel, and in
# guest/web the wheels of the template websearch-tools.
HOST_SIDE = "client"
LIBRARIES = {
    "kernels": {"IPython", "matplotlib", "matplotlib_inline", "traitlets"},
    "web": {
        *("brotli", "certifi", "charset_normalizer", "ddgs", "httpx", "lxml", "lxml_html_clean"),
        *("pypdf", "python_calamine", "trafilatura"),
    },
}


def modules(file: Path) -> set[str]:
    """The modules that a file imports or imports from, however late."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def imports(file: Path) -> set[str]:
    """The top-level names of everything a file imports, however late."""
    return {name.partition(".")[0] for name in modules(file)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[room] - {room}
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / room).rglob("*.py")
        for name in imports(file) & forbidden
    }
    assert wrong == set()


def parts(file: Path) -> set[str]:
    """The parts of mcp_sandbox that a file imports from, however late."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        match node:
            case ast.Import():
                found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("mcp_sandbox.")}
            case ast.ImportFrom(module="mcp_sandbox"):
                found |= {name.name for name in node.names}
            case ast.ImportFrom(module=str(module)) if module.startswith("mcp_sandbox."):
                found.add(module.split(".")[1])
    return found


def files_of(part: str) -> list[Path]:
    """The files of a folder or module of mcp_sandbox."""
    return [*(ROOT / "mcp_sandbox" / part).rglob("*.py"), *(ROOT / "mcp_sandbox").glob(f"{part}.py")]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_product_imports_only_what_is_below_it(part):
    assert files_of(part)
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files_of(part)
        for name in parts(file) - PARTS[part] - {part}
    }
    assert wrong == set()


def test_every_part_of_the_product_has_its_arrows():
    found = {path.stem for path in (ROOT / "mcp_sandbox").iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    assert found == {*PARTS, "__init__"}


def test_code_that_runs_in_a_machine_needs_only_the_standard_library():
    allowed = sys.stdlib_module_names | {"guest"}
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / "guest").rglob("*.py")
        if file.parent.name != HOST_SIDE
        for name in imports(file) - allowed - LIBRARIES.get(file.parent.name, set())
    }
    assert wrong == set()


def test_only_the_web_service_imports_the_code_that_needs_wheels():
    wrong = {
        str(file.relative_to(ROOT))
        for room in MAY_IMPORT
        for file in (ROOT / room).rglob("*.py")
        if file.parent != ROOT / "guest" / "web" and any(name.startswith("guest.web") for name in modules(file))
    }
    assert wrong == set()


def test_a_client_of_a_shared_server_imports_only_the_standard_library():
    wrong = {
        f"{file.name} imports {name}"
        for file in (*files_of("connect"), *files_of("start"))
        for name in imports(file) - sys.stdlib_module_names - {"mcp_sandbox"}
    }
    assert wrong == set()


def test_what_the_selftest_copies_into_sandboxes_needs_only_the_standard_library():
    files = list(IN_SANDBOXES.glob("*.py"))
    assert files
    wrong = {f"{file.name} imports {name}" for file in files for name in imports(file) - sys.stdlib_module_names}
    assert wrong == set()
