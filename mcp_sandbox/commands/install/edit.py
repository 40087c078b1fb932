"""Adds a server to the text of a configuration, or removes it, and changes nothing else. No file is touched here."""

import json
import re
from collections.abc import MutableMapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from mcp_sandbox.commands.install.clients import Client, Entry

INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)
DEFAULT_INDENT = "  "


class CannotEdit(Exception):
    """The text is not what we can change without losing something."""


def with_server(client: Client, text: str, name: str, entry: Entry) -> str:
    """Return the configuration with the server. Raises CannotEdit."""
    content = _parse(client, text)
    _table(client, content)[name] = entry
    return _render(client, text, content)


def without_server(client: Client, text: str, name: str) -> str:
    """Return the configuration without the server. Raises CannotEdit."""
    content = _parse(client, text)
    if client.table in content and name in _table(client, content):
        del _table(client, content)[name]
        return _render(client, text, content)
    return text


def snippet(client: Client, name: str, entry: Entry) -> str:
    """Return what a user can paste."""
    return with_server(client, "", name, entry)


def _parse(client: Client, text: str) -> MutableMapping[str, Any]:
    try:
        if client.syntax == "toml":
            return tomlkit.parse(text)
        content = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError, TOMLKitError) as error:
        # VS Code and Zed allow comments and trailing commas, which a JSON writer would drop.
        raise CannotEdit(f"it is not plain {client.syntax.upper()} ({error})") from error
    if not isinstance(content, dict):
        raise CannotEdit("it is not a table of settings")
    return content


def _table(client: Client, content: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    empty = tomlkit.table(is_super_table=True) if client.syntax == "toml" else {}
    found = content.setdefault(client.table, empty)
    if not isinstance(found, MutableMapping):
        raise CannotEdit(f"its {client.table} is not a table")
    return found


def _render(client: Client, before: str, content: MutableMapping[str, Any]) -> str:
    if client.syntax == "toml":
        return tomlkit.dumps(content)
    indent = INDENT.search(before)
    return json.dumps(content, indent=indent[1] if indent else DEFAULT_INDENT, ensure_ascii=False) + "\n"
