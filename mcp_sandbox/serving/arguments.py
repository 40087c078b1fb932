"""Arguments of tools: short schemas for models to read, and text that stays text."""

from functools import cached_property
from typing import Any

from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata

NULL = {"type": "null"}
DEFINITION = "#/$defs/"
LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "maxProperties")
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
FAR = 2**31 - 1
NEAR = (1, FAR)  # bounds that a model could miss are between them
OBVIOUS: dict[str, tuple[object, ...]] = {"default": (False, "", 0), "additionalProperties": (False,)}


class VerbatimArguments(FuncMetadata):
    """Arguments of a function, of which text is passed on as it is.

    The SDK parses every string that looks like JSON unless the argument is exactly `str`: stdin="null" of an optional
    argument would be no stdin. Lists and objects that a client sends as a string are still parsed.
    """

    @cached_property
    def _texts(self) -> frozenset[str]:
        properties = self.arg_model.model_json_schema(by_alias=True)["properties"]
        return frozenset(name for name, schema in properties.items() if _takes_text(schema))

    def pre_parse_json(self, data: dict[str, Any]) -> dict[str, Any]:
        """Parse the strings in `data` that cannot be meant as text."""
        return super().pre_parse_json(data) | {name: data[name] for name in data.keys() & self._texts}


def keep_text(tool: Tool) -> None:
    """Have a tool pass text on as it is."""
    tool.fn_metadata = VerbatimArguments.model_validate(dict(tool.fn_metadata))


def _takes_text(schema: dict[str, Any]) -> bool:
    return any(part.get("type") == "string" for part in schema.get("anyOf", [schema]))


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles and references, and without null for what can be left out."""
    found = _plain(schema, schema.get("$defs", {}))
    assert isinstance(found, dict), "an object stays one"
    return found


def _plain(schema: Any, definitions: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(schema, list):
        return [_plain(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:  # each definition is used once, and is shorter in its place
        found = definitions[schema["$ref"].removeprefix(DEFINITION)]
        schema = _without(found, "description") | _without(schema, "$ref")  # without its docstring
    kept = {name: _plain(part, definitions) for name, part in schema.items() if not _is_noise(name, part)}
    match kept.get("anyOf"):
        case [dict(only), null] if null == NULL and "default" in kept and kept["default"] is None:
            return only | _without(kept, "anyOf", "default")
    return kept


def _is_noise(name: str, part: object) -> bool:
    return name == "$defs" or (name == "title" and isinstance(part, str))  # an argument with this name is an object


def lean(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a plain schema without what a model need not know: the server checks all limits, and explains them."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if isinstance(schema, dict):
        return {name: lean(part) for name, part in schema.items() if not _is_obvious(name, part)}
    return int(schema) if isinstance(schema, float) and schema.is_integer() else schema


def _is_obvious(name: str, part: object) -> bool:
    if isinstance(part, dict | list):  # of an argument that has such a name
        return False
    if name in BOUNDS:
        return isinstance(part, int | float) and not NEAR[0] < part < NEAR[1]
    return name in LENGTHS or (name in OBVIOUS and part in OBVIOUS[name])


def _without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: part for name, part in schema.items() if name not in names}
