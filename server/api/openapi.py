"""Describes the table of routes as an OpenAPI 3.1 document, and that document as a page; knows no route by name."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from server.api.body import Body
from server.api.endpoint import Endpoint

REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """The document of https://spec.openapis.org/oas/v3.1.1; request bodies come from their pydantic models."""
    bodies = list(dict.fromkeys(body for endpoint in endpoints for body in _forms(endpoint)))
    references, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=REFERENCE, by_alias=True
    )
    for body in bodies:
        schema = schemas["$defs"][body.__name__]
        schema["properties"] |= {name: {"description": no_op.why} for name, no_op in body.no_ops.items()}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        schemes = [references[body, "validation"] for body in _forms(endpoint)]
        paths.setdefault(_path(endpoint), {})[endpoint.method.lower()] = _operation(endpoint, schemes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


def _forms(endpoint: Endpoint) -> tuple[type[Body], ...]:
    if endpoint.body is None:
        return ()
    return endpoint.body if isinstance(endpoint.body, tuple) else (endpoint.body,)


def _path(endpoint: Endpoint) -> str:
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", endpoint.path)


def _operation(endpoint: Endpoint, schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    error = {
        "description": "refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "tags": [next(part for part in endpoint.path.split("/") if part not in ("", "v1")).partition(":")[0]],
        "responses": {
            "200": {"description": "done", "content": {kind: {} for kind in endpoint.replies}},
            "default": error,
        },
    }
    names = re.findall(r"\{(\w+)", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if schemas:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def docs_page(document: Mapping[str, Any]) -> str:
    """The document as one page of HTML that loads nothing: it must work where the server has no way out."""
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = (
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
            )
            body = operation.get("requestBody")
            parts.append(title + (_body(body["content"]["application/json"]["schema"], document) if body else ""))
    title = f"jaxserve {html.escape(document['info']['version'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}</html>'
    )


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2rem .8rem .2rem 0;vertical-align:top}"
    "h2{margin-top:2.5rem;font-size:1.1rem}"
)


def _body(schema: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    tables = []
    for form in schema.get("anyOf", [schema]):
        name = form["$ref"].rpartition("/")[2]
        model = document["components"]["schemas"][name]
        rows = "".join(
            f"<tr><td><code>{html.escape(field)}</code>{' *' if field in model.get('required', ()) else ''}</td>"
            f"<td>{html.escape(_describe(value))}</td></tr>"
            for field, value in model["properties"].items()
        )
        tables.append(f"<details><summary>{html.escape(name)} (* required)</summary><table>{rows}</table></details>")
    return "".join(tables)


def _describe(schema: Mapping[str, Any]) -> str:
    """A field's type in words, or the reason why it is hardly taken."""
    if "description" in schema:
        return str(schema["description"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_describe(form) for form in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_describe(schema.get('items', {}))}"
    return str(schema.get("type", "any JSON"))
