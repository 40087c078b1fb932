"""server.json for the MCP registry and the .mcpb bundle say what pyproject.toml says, and keep their formats' rules.

The rules are those of the published schemas that the two files name: server.json of 2025-12-11, manifest 0.4.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from mcp_sandbox.config import Settings, variable_of
from vmm.driver import DRIVERS

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
SERVER = json.loads((REPO / "server.json").read_text())
MANIFEST = json.loads((REPO / "mcpb" / "manifest.json").read_text())

TEXT = {"type": "string", "minLength": 1}
VARIABLE = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": TEXT,
        "description": TEXT,
        "default": TEXT,
        "value": TEXT,
        "choices": {"type": "array", "items": TEXT},
        "format": {"enum": ["string", "number", "boolean", "filepath"]},
        "isRequired": {"type": "boolean"},
        "isSecret": {"type": "boolean"},
    },
    "additionalProperties": False,
}
PACKAGE = {
    "type": "object",
    "required": ["registryType", "identifier", "version", "transport"],  # PyPI needs a version, the schema does not
    "properties": {
        "registryType": {"const": "pypi"},
        "registryBaseUrl": {"const": "https://pypi.org"},
        "identifier": TEXT,
        "version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "runtimeHint": TEXT,
        "transport": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"const": "stdio"}},
            "additionalProperties": False,
        },
        "environmentVariables": {"type": "array", "items": VARIABLE},
    },
    "additionalProperties": False,
}
SERVER_RULES = {
    "type": "object",
    "required": ["$schema", "name", "description", "version", "packages"],
    "properties": {
        "$schema": {"const": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"},
        "name": {"type": "string", "pattern": r"^[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+$", "minLength": 3, "maxLength": 200},
        "title": {**TEXT, "maxLength": 100},
        "description": {**TEXT, "maxLength": 100},
        "version": {**TEXT, "maxLength": 255},
        "packages": {"type": "array", "minItems": 1, "items": PACKAGE},
    },
    "additionalProperties": False,
}
TEXTS = {"type": "array", "items": TEXT}
MANIFEST_RULES = {
    "type": "object",
    "required": ["manifest_version", "name", "version", "description", "author", "server"],
    "properties": {
        "manifest_version": {"const": "0.4"},
        "name": TEXT,
        "display_name": TEXT,
        "version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "description": TEXT,
        "author": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
        "license": TEXT,
        "keywords": TEXTS,
        "tools_generated": {"type": "boolean"},
        "server": {
            "type": "object",
            "required": ["type", "entry_point"],
            "properties": {
                "type": {"const": "uv"},
                "entry_point": TEXT,
                "mcp_config": {
                    "type": "object",
                    "required": ["command"],
                    "properties": {
                        "command": TEXT,
                        "args": TEXTS,
                        "env": {"type": "object", "additionalProperties": TEXT},
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "compatibility": {
            "type": "object",
            "properties": {
                "platforms": {"type": "array", "items": {"enum": ["darwin", "win32", "linux"]}},
                "runtimes": {"type": "object", "additionalProperties": TEXT},
            },
        },
        "user_config": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["type", "title", "description"],
                "properties": {"type": {"enum": ["string", "number", "boolean", "directory", "file"]}},
            },
        },
    },
    "additionalProperties": False,
}


def problems(value: Any, rules: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(rules).iter_errors(value)]


def test_the_registrys_file_keeps_its_rules_and_names_this_package():
    assert problems(SERVER, SERVER_RULES) == []
    [package] = SERVER["packages"]
    assert package["identifier"] == PROJECT["name"]
    assert SERVER["version"] == package["version"] == PROJECT["version"]


def test_the_registry_finds_its_name_in_the_readme_that_the_package_carries():
    assert f"mcp-name: {SERVER['name']}" in (REPO / PROJECT["readme"]).read_text()


def test_the_variables_that_clients_ask_for_are_settings():
    settings = {variable_of(name) for name in Settings.model_fields}
    [package] = SERVER["packages"]
    assert {variable["name"] for variable in package["environmentVariables"]} <= settings
    assert MANIFEST["server"]["mcp_config"]["env"].keys() <= settings
    choices = next(variable["choices"] for variable in package["environmentVariables"] if "choices" in variable)
    assert {"auto", *DRIVERS} == set(choices)


def test_the_bundles_manifest_keeps_its_rules_and_starts_this_package():
    assert problems(MANIFEST, MANIFEST_RULES) == []
    config = MANIFEST["server"]["mcp_config"]
    assert (MANIFEST["name"], MANIFEST["version"]) == (PROJECT["name"], PROJECT["version"])
    assert config["args"][-1] in PROJECT["scripts"]
    assert MANIFEST["compatibility"]["runtimes"]["python"] == PROJECT["requires-python"]
    asked = {name for text in config["env"].values() for name in re.findall(r"\$\{user_config\.(\w+)}", text)}
    assert asked == MANIFEST["user_config"].keys()


def test_a_bundle_is_built_that_has_everything_the_server_needs(tmp_path: Path):
    built = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "build_mcpb.py"), str(tmp_path)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / f"mcp-sandbox-{PROJECT['version']}.mcpb") as bundle:
        bundle.extractall(tmp_path / "bundle")
    unpacked = tmp_path / "bundle"
    assert json.loads((unpacked / "manifest.json").read_text()) == MANIFEST
    assert (unpacked / MANIFEST["server"]["entry_point"]).is_file()
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "mcp_sandbox", "template", "list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert "python-data-analysis" in ran.stdout, ran.stderr
