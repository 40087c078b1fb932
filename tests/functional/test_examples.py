"""Each example does what its docstring says, on real machines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import BUILD_S, promised

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_S = 60.0  # an example takes less than a minute
AGENTS = {"openai_agents": "agents", "pydantic_ai_agent": "pydantic_ai", "langgraph_agent": "langgraph"}
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("in_force")]


def call(directory: Path, *argv: str, limit_s: float | None = None) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(
        argv, cwd=directory, env=env, capture_output=True, text=True, timeout=limit_s or promised(EXAMPLE_S)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_example_is_tested_here():
    tested = {"cpp_cases.py", "mcp_client.py", "run_once.sh", "sdk.py", "web_to_table.py", "when_code_misbehaves.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
    assert {path.stem for path in (EXAMPLES / "agents").glob("*.py")} == set(AGENTS)


@pytest.mark.parametrize(("name", "library"), AGENTS.items())
def test_an_agent_with_a_scripted_model_runs_code_in_a_sandbox(tmp_path: Path, name: str, library: str):
    pytest.importorskip(library, reason=f"{library} is not installed: pip install '.[agents]'")
    text = call(tmp_path, sys.executable, str(EXAMPLES / "agents" / f"{name}.py"))
    assert re.search(r"The sandbox says: result:\n285\n\n\[ok ", text)


def test_the_client_computes_draws_and_saves_a_chart(tmp_path: Path):
    text = call(tmp_path, sys.executable, str(EXAMPLES / "mcp_client.py"))
    assert "543" in text
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)


def test_the_sdk_streams_forks_and_saves_a_chart_without_a_server(tmp_path: Path):
    text = call(tmp_path, sys.executable, str(EXAMPLES / "sdk.py"))
    for words in ("read 4,160\n", "sum: 543, after", "a line says 164.0 for month 5", "a parabola says"):
        assert words in text
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)


def test_the_shell_script_prints_and_saves_what_the_code_left(tmp_path: Path):
    text = call(tmp_path, str(EXAMPLES / "run_once.sh"), "kept")
    assert "the walk ends at" in text
    assert (tmp_path / "kept" / "figure-1.png").read_bytes().startswith(PNG)
    assert len((tmp_path / "kept" / "steps.csv").read_text().splitlines()) == 500


def test_results_of_code_that_misbehaves_are_truthful(tmp_path: Path):
    text = call(tmp_path, sys.executable, str(EXAMPLES / "when_code_misbehaves.py"))
    for words in (
        "ZeroDivisionError: division by zero",
        "exited with code 3",
        "stopped: time limit of 5 s reached; variables are kept",
        "result:\n42",
        "bytes omitted; to read on: read_output(",
        "was closed; its variables and files are gone. Call create_sandbox to get a new one.",
    ):
        assert words in text


def test_a_program_in_cpp_is_judged_case_by_case(tmp_path: Path):
    call(tmp_path, "mcp-sandbox", "template", "build", "cpp-algorithm", limit_s=BUILD_S)
    text = call(tmp_path, sys.executable, str(EXAMPLES / "cpp_cases.py"))
    for words in (
        "cases: 1 passed, 1 wrong output, 1 runtime error\n",
        'line 1: expected "-2", got "-1"',
        "3: runtime error, SIGFPE",
    ):
        assert words in text


def test_a_table_of_the_web_is_analysed_in_an_offline_sandbox(tmp_path: Path):
    call(tmp_path, "mcp-sandbox", "template", "build", "websearch-tools", limit_s=BUILD_S)
    text = call(tmp_path, sys.executable, str(EXAMPLES / "web_to_table.py"))
    assert "less rain than in any year since 1976" in text
    assert "delete all files" not in text
    assert re.search(r"Hof +459\nAu +526\nBerg +646", text)
