"""The OpenAPI document, made from the same operations as the routes."""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from mcp_sandbox.rest.bodies import Nothing
from mcp_sandbox.rest.examples import EXAMPLES
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.rest.operations import ID, MAX_KEY_CHARS, Operation
from mcp_sandbox.rest.problems import PROBLEM_TYPE, Problem
from mcp_sandbox.views import View

JSON = "application/json"
REFERENCE = "#/components/schemas/{model}"
DESCRIPTION = (
    "Isolated sandboxes that run code. Errors are problems (RFC 9457) with a stable code and a hint. "
    "A request with an Idempotency-Key can be repeated: it is carried out once, even if its client disconnects. "
    "Without a key, work ends with the connection that asked for it."
)

Schema = dict[str, Any]
Schemas = Mapping[tuple[Any, JsonSchemaMode], Schema]  # by model


def document(operations: Iterable[Operation[Any, Any]]) -> Schema:
    """Return the OpenAPI document of these operations."""
    operations = list(operations)
    references, definitions = models_json_schema(
        sorted(set(_models(operations)), key=lambda pair: (pair[0].__name__, pair[1])), ref_template=REFERENCE
    )
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mcp-sandbox", "version": version("mcp-sandbox"), "description": DESCRIPTION},
        "servers": [{"url": ROOT}],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "Only if the server has tokens."}
            },
        },
    }


def _models(operations: list[Operation[Any, Any]]) -> Iterable[tuple[type[BaseModel], JsonSchemaMode]]:
    yield Problem, "serialization"
    for operation in operations:
        yield from ((kind, "serialization") for kind in operation.answers.values() if isinstance(kind, type))
        if operation.body is not Nothing:
            yield operation.body, "validation"


def _described(operation: Operation[Any, Any], references: Schemas) -> Schema:
    problem = {PROBLEM_TYPE: {"schema": references[Problem, "serialization"], "example": EXAMPLES[Problem]}}
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {
            **{str(status): _response(kind, references) for status, kind in operation.answers.items()},
            "default": {"description": "A problem.", "content": problem},
        },
    }
    if operation.uploads:
        described["requestBody"] = {"content": {"application/octet-stream": {}}}
    elif operation.body is not Nothing:
        required = any(field.is_required() for field in operation.body.model_fields.values())
        content = {"schema": references[operation.body, "validation"]}
        described["requestBody"] = {"required": required, "content": {JSON: content}}
    return described


def _parameters(operation: Operation[Any, Any]) -> list[Schema]:
    path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{ID.pattern}$"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    schema = operation.query.model_json_schema()
    query = [
        {"name": name, "in": "query", "required": name in schema.get("required", []), "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]
    return [*path, *query, *_headers(operation)]


def _headers(operation: Operation[Any, Any]) -> Iterable[Schema]:
    if operation.keyed:
        key = {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS}
        yield {"name": "Idempotency-Key", "in": "header", "schema": key, "example": "4f1c7d2a"}
    if "text/event-stream" in operation.answers.values():
        last = {"type": "string", "pattern": "^([0-9]{1,18}|end)$"}
        yield {"name": "Last-Event-ID", "in": "header", "schema": last, "example": "1024"}
    if 206 in operation.answers:
        yield {"name": "Range", "in": "header", "schema": {"type": "string"}, "example": "bytes=0-1023"}


def _response(kind: type[View] | str | None, references: Schemas) -> Schema:
    if kind is None:
        return {"description": "Nothing more."}
    if isinstance(kind, str):
        return {"description": "The content.", "content": {kind: {}}}
    content: Schema = {"schema": references[kind, "serialization"]}
    if kind in EXAMPLES:
        content["example"] = EXAMPLES[kind]
    return {"description": (kind.__doc__ or "").partition("\n")[0], "content": {JSON: content}}
