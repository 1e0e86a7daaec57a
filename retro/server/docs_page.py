"""`GET /docs`: the OpenAPI description as an HTML page with an example command for each endpoint. It loads nothing else."""

import base64
import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)

_TEMPLATE = Path(__file__).parent / "templates" / "docs.html"


@router.get("/docs")
def docs(request: Request) -> Response:
    """Description of the API as an HTML page."""
    html = docs_html(request.app.openapi(), str(request.base_url).rstrip("/"))
    style = re.search("<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; frame-ancestors 'none'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


def docs_html(openapi: dict[str, Any], base_url: str) -> str:
    """Render an OpenAPI description as HTML."""
    import jinja2

    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            described = _operation(openapi, base_url, method.upper(), path, operation)
            groups.setdefault(operation.get("tags", ["other"])[0], []).append(described)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(info=openapi["info"], groups=groups)


def _operation(
    openapi: dict[str, Any], base_url: str, method: str, path: str, operation: dict[str, Any]
) -> dict[str, Any]:
    """Return the values that the template shows for one endpoint."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = _resolved(openapi, body)
    command = f"curl {shlex.quote(base_url + path)}" if "{" not in path else ""
    if schema:
        example = json.dumps(schema.get("examples", [{}])[0])
        command += f" \\\n  -H 'Content-Type: application/json' -d {shlex.quote(example)}"
    fields = _fields(schema) + [
        {
            "name": each["name"],
            "type": _type(each["schema"]),
            "required": each.get("required", False),
            "description": each["schema"].get("description", ""),
        }
        for each in operation.get("parameters", ())
    ]
    answered = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
    answers = [(status, each["description"]) for status, each in operation["responses"].items()]
    return {
        "method": method,
        "path": path,
        "description": operation.get("description", ""),
        "command": command,
        "fields": fields,
        "answer": _fields(_resolved(openapi, answered)),
        "answers": answers,
    }


def _fields(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of an object's schema."""
    required = schema.get("required", ())
    return [
        {"name": name, "type": _type(value), "required": name in required, "description": value.get("description", "")}
        for name, value in schema.get("properties", {}).items()
    ]


def _resolved(openapi: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = openapi["components"]["schemas"][name] if name else schema
    return found


def _type(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words, with its default."""
    kind = schema.get("type", "")
    if "enum" in schema:
        kind = " | ".join(map(json.dumps, schema["enum"]))
    elif "$ref" in schema:
        kind = schema["$ref"].rpartition("/")[2]
    elif "anyOf" in schema:
        kind = " | ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    elif kind == "array":
        kind = f"[{_type(schema.get('items', {}))}]"
    default = schema.get("default")
    return f"{kind} = {json.dumps(default)}" if default is not None else str(kind)
