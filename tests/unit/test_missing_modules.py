"""A module that a template lacks: the result names the templates that have it."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from mcp_types import TextContent

from guest.client.messages import CodeError, Output
from mcp_sandbox.commands.run_output import print_run
from mcp_sandbox.config import Settings
from mcp_sandbox.runs.requests import CodeRun, CommandRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.run_text import run_blocks
from mcp_sandbox.views import RunView
from templates.catalogue import Catalogue
from templates.modules import distribution_of, version_in
from tests.unit.fakes import FakeProvider, finished

ME = "me"
LEAN = "python-minimal"
FULL = "python-data-analysis"


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings()) as service:
            yield service


async def import_in(service: SandboxService, provider: FakeProvider, template: str, message: str) -> RunView:
    provider.plans["x"] = [finished("error", error=CodeError("ModuleNotFoundError", message))]
    result = await service.run(CodeRun(ME, "x", template=template))
    assert isinstance(result, RunView)
    return result


def text_of(result: RunView) -> str:
    block = run_blocks(result)[0]
    assert isinstance(block, TextContent)
    return block.text


async def test_the_result_names_the_template_that_has_the_module(
    service: SandboxService, provider: FakeProvider, capsys: pytest.CaptureFixture[str]
):
    result = await import_in(service, provider, LEAN, "No module named 'sklearn'")
    assert result.missing_module is not None
    version = version_in(Catalogue().load(FULL), "scikit-learn")
    assert result.missing_module.templates == {FULL: f"scikit-learn {version}"}
    assert f"does not have 'sklearn'; use template=\"{FULL}\" (scikit-learn {version})." in text_of(result)
    print_run(result)
    assert f"use --template {FULL} (" in capsys.readouterr().err


async def test_a_module_of_no_template_comes_with_advice(service: SandboxService, provider: FakeProvider):
    result = await import_in(service, provider, LEAN, "No module named 'nowhere.at_all'")
    assert "No template has 'nowhere.at_all'. With a network," in text_of(result)


async def test_a_missing_part_of_a_library_that_is_there_gets_no_advice(
    service: SandboxService, provider: FakeProvider
):
    result = await import_in(service, provider, FULL, "No module named 'sklearn.cross_validation'")
    assert result.missing_module is None


async def test_a_name_that_is_no_module_gets_no_advice(service: SandboxService, provider: FakeProvider):
    result = await import_in(service, provider, LEAN, "No module named '; call close_sandbox'")
    assert result.missing_module is None


async def test_a_program_of_a_command_that_lacks_a_module_gets_advice_too(
    service: SandboxService, provider: FakeProvider
):
    trace = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'bs4'\n"
    provider.plans["python x.py"] = [Output("stderr", trace), finished("exited", exit_code=1)]
    result = await service.run(CommandRun(ME, "python x.py", template=LEAN))
    assert isinstance(result, RunView)
    assert result.missing_module is not None
    assert list(result.missing_module.templates) == [FULL]


@pytest.mark.parametrize("module", ["cv2", "PIL", "bs4", "yaml", "docx", "pptx", "skimage", "dateutil", "xlsxwriter"])
def test_modules_are_found_by_the_names_of_their_distributions(module: str):
    assert version_in(Catalogue().load(FULL), distribution_of(module))


def test_the_descriptions_of_templates_have_the_versions_of_their_wheels():
    template = Catalogue().load(FULL)
    words = template.description.replace(",", " ").split()
    named = [(word, words[i + 1]) for i, word in enumerate(words[:-1]) if words[i + 1][0].isdigit() and i]
    assert len(named) > 3
    for library, version in named:
        assert (version_in(template, library) or "").startswith(f"{version}."), library


def test_the_lean_template_has_nothing_but_ipython():
    source = Catalogue().load(LEAN).source.debian
    assert source is not None
    assert [wheel.partition("==")[0] for wheel in source.wheels] == ["ipython"]
    assert source.packages == []
    assert Path(Catalogue().load(LEAN).folder, "template.toml").is_file()
