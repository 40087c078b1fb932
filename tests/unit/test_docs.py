"""What the documents say about the code is true of it."""

import re
from pathlib import Path

import pytest
import typer
from mcp import Client
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from mcp_sandbox.cli import app
from mcp_sandbox.config import ENV_PREFIX, Settings, setting_names, variable_of
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import create_server
from templates.catalogue import Catalogue
from tests.unit.fakes import FakeProvider

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ROOT_COMMAND = typer.main.get_command(app)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


async def tools_of_the_server() -> set[str]:
    settings = Settings(toolset="advanced")
    server = create_server(settings, "vm", lambda: SandboxService(FakeProvider(), settings))
    async with Client(server) as client:
        return {tool.name for tool in (await client.list_tools()).tools}


async def test_every_tool_is_described_and_every_tool_described_is_there():
    tools = await tools_of_the_server()
    assert set(re.findall(r"^## `(\w+)`$", text_of("docs/tools.md"), re.MULTILINE)) == tools
    assert set(re.findall(r"^\| `(\w+)` \| (?:yes|no) \|", text_of("docs/tools.md"), re.MULTILINE)) == tools


async def test_the_readmes_table_names_every_tool():
    section = text_of("README.md").split("## Tools\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == await tools_of_the_server()


def settings_documented() -> dict[str, tuple[str, str]]:
    """Setting: its variable and its default."""
    row = re.compile(rf"^\| `([\w.]+)` \| `({ENV_PREFIX}\w+)` \| (.+?) \|", re.MULTILINE)
    return {
        name: (variable, default.strip("`")) for name, variable, default in row.findall(text_of("docs/operations.md"))
    }


def test_every_setting_is_documented_with_its_variable_and_its_default(monkeypatch: pytest.MonkeyPatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    expected = {}
    for name, field in setting_names():
        default = field.get_default(call_default_factory=True, validated_data={})
        assert default is not PydanticUndefined
        if isinstance(default, tuple):
            (default,) = default
        if isinstance(default, Path):
            default = f"~/{default.relative_to(Path.home())}"
        expected[name] = (variable_of(name), "none" if default is None else str(default))
    assert settings_documented() == expected


def test_every_template_is_documented():
    overview = text_of("docs/templates.md").split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", overview, re.MULTILINE)
    assert set(rows) == set(Catalogue().templates())


def command_lines() -> set[tuple[str, ...]]:
    """All `mcp-sandbox …` lines in code blocks and code spans, as words."""
    found = set()
    for document in DOCUMENTS:
        text = document.read_text()
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", text)
        found |= {tuple(line.split()[1:]) for line in lines if line.split()[:1] == ["mcp-sandbox"]}
    return found


def problem_of(words: tuple[str, ...]) -> str | None:
    """What is wrong with a command line, if anything."""
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


def test_every_command_line_in_the_documents_is_one_the_program_takes():
    lines = command_lines()
    assert ("doctor",) in lines
    assert {" ".join(words): problem for words in lines if (problem := problem_of(words))} == {}


def test_a_command_line_that_is_wrong_would_be_noticed():
    assert problem_of(("serve",)) == "there is no command serve"
    assert problem_of(("doctor", "--yaml")) == "doctor has no option --yaml"
    assert problem_of(("template", "remove", "a", "b")) == "too many arguments"


def anchors(document: Path) -> set[str]:
    """The anchors that headings get."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_leads_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_of_ours_that_is_named_is_there(document: Path):
    rooms = "docs|examples|guest|mcp_sandbox|templates|tests|vmm"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.(?:py|md|sh|toml))`", document.read_text()):
        assert (ROOT / name).exists(), name
