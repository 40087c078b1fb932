"""The documents agree with the code."""

import re
from pathlib import Path

import pytest
import typer
from mcp import Client
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from mcp_sandbox.cli import app
from mcp_sandbox.config import ENV_PREFIX, Settings, setting_names, variable_of
from mcp_sandbox.rest.app import OPERATIONS
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import create_server
from templates.catalogue import Catalogue
from tests.unit.fakes import FakeProvider

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
ROOT_COMMAND = typer.main.get_command(app)
README_LINES = 150  # a newcomer reads it in a few minutes; details belong in docs/
DECISION_LINES = 25


def text_of(name: str) -> str:
    """Return the text of a document."""
    return (ROOT / name).read_text()


def named(path: Path) -> str:
    """Return a document's name, for test ids."""
    return str(path.relative_to(ROOT))


async def server_tools() -> set[str]:
    """Return the names of all tools, advanced ones included."""
    settings = Settings(toolsets=("advanced",), host_dirs=("out=/srv/out:rw",))
    server = create_server(settings, "vm", lambda: SandboxService(FakeProvider(), settings))
    async with Client(server) as client:
        return {tool.name for tool in (await client.list_tools()).tools}


async def test_tools_md_describes_every_tool_and_no_other():
    tools = await server_tools()
    assert set(re.findall(r"^## `(\w+)`$", text_of("docs/tools.md"), re.MULTILINE)) == tools
    assert set(re.findall(r"^\| `(\w+)` \| (?:yes|no) \|", text_of("docs/tools.md"), re.MULTILINE)) == tools


async def test_the_readme_lists_every_tool():
    section = text_of("README.md").split("## What you can do\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == await server_tools()


def settings_documented() -> dict[str, tuple[str, str]]:
    """Return the variable and the default of every setting in the table."""
    row = re.compile(rf"^\| `([\w.]+)` \| `({ENV_PREFIX}\w+)` \| (.+?) \|", re.MULTILINE)
    return {
        name: (variable, default.strip("`")) for name, variable, default in row.findall(text_of("docs/operations.md"))
    }


def shown(value: object) -> str:
    return f"~/{value.relative_to(Path.home())}" if isinstance(value, Path) else str(value)


def test_operations_md_lists_every_setting_with_its_variable_and_default(monkeypatch: pytest.MonkeyPatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    expected = {}
    for name, field in setting_names():
        default = field.get_default(call_default_factory=True, validated_data={})
        assert default is not PydanticUndefined
        values = default if isinstance(default, tuple) else () if default in (None, {}) else (default,)
        expected[name] = (variable_of(name), ",".join(map(shown, values)) or "none")
    assert settings_documented() == expected


def test_templates_md_lists_every_built_in_template():
    overview = text_of("docs/templates.md").split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", overview, re.MULTILINE)
    assert set(rows) == set(Catalogue().templates())


def command_lines() -> set[tuple[str, ...]]:
    """Return the words of every `mcp-sandbox …` line in code blocks and code spans."""
    found = set()
    for document in DOCUMENTS:
        text = document.read_text()
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", text)
        found |= {tuple(line.split()[1:]) for line in lines if line.split()[:1] == ["mcp-sandbox"]}
    return found


def problem_of(words: tuple[str, ...]) -> str | None:
    """Return what is wrong with a command line, or None."""
    command, arguments = ROOT_COMMAND, 0
    path: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        subcommands = getattr(command, "commands", {})
        if word.startswith("-") and word != "-":
            option = next((parameter for parameter in command.params if word in parameter.opts), None)
            if option is None:
                return f"{' '.join(path) or 'mcp-sandbox'} has no option {word}"
            if not getattr(option, "is_flag", False) and rest:
                rest.pop(0)
        elif subcommands:
            if word not in subcommands:
                return f"there is no command {word}"
            command = subcommands[word]
            path.append(word)
        else:
            arguments += 1
    taken = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if arguments > len(taken) and not any(parameter.nargs == -1 for parameter in taken):
        return "too many arguments"
    done = CliRunner().invoke(app, [*path, "--help"])
    return None if done.exit_code == 0 else done.output


def test_every_command_line_in_the_documents_is_valid():
    lines = command_lines()
    assert ("doctor",) in lines
    assert {" ".join(words): problem for words in lines if (problem := problem_of(words))} == {}


def test_an_invalid_command_line_is_noticed():
    assert problem_of(("sing",)) == "there is no command sing"
    assert problem_of(("doctor", "--yaml")) == "doctor has no option --yaml"
    assert problem_of(("template", "remove", "a", "b")) == "too many arguments"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_has_a_target(document: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_named_in_a_document_exists(document: Path):
    rooms = "docs|examples|guest|mcp_sandbox|templates|tests|vmm"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.(?:py|md|sh|toml))`", document.read_text()):
        assert (ROOT / name).exists(), name


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= README_LINES


def test_the_architecture_links_to_every_decision_record():
    linked = re.findall(r"\]\(decisions/([\w.-]+)\)", text_of("docs/architecture.md"))
    assert DECISIONS
    assert sorted(linked) == [record.name for record in DECISIONS]


@pytest.mark.parametrize("record", DECISIONS, ids=named)
def test_a_decision_record_is_short_and_has_its_three_parts(record: Path):
    text = record.read_text()
    assert re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", record.name)
    assert text.startswith(f"# {record.name[:3]}: ")
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= DECISION_LINES


def test_rest_md_lists_every_operation_and_no_other():
    listed = re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", text_of("docs/rest.md"), re.MULTILINE)
    assert sorted(listed) == sorted(f"{operation.method} {operation.path}" for operation in OPERATIONS)
