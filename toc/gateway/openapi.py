"""The document of the API (OpenAPI 3.1) and the page at /docs, made from the declarations of the calls."""

from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from inspect import getdoc
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from toc.gateway.calls import HttpCall, Nothing, takes_nothing
from toc.gateway.problems import KINDS

_REFERENCE = "#/components/schemas/{model}"
_FAILED = {
    "description": "A problem: its status and type say which.",
    "content": {"application/problem+json": {"schema": {"$ref": _REFERENCE.format(model="Problem")}}},
}
_PATH: dict[str, tuple[str, str]] = {
    "topic": ("The topic's name.", r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"),
    "topics": (
        "Names of topics with commas between them, in order of preference.",
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(,[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,99}$",
    ),
    "job_id": ("The job_id that submit returned.", r"^[1-9][0-9]{0,18}$"),
    "host": ("The host's name, as /v1/workers shows it.", r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"),
    "slot": ("The slot, as /v1/slots shows it: order.close_3.", r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}_[0-9]+$"),
    "name": ("The name.", r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$"),
    "pattern": ("The pattern.", r"^[A-Za-z0-9*][A-Za-z0-9._*-]{0,127}$"),
}


@cache
def document(calls: tuple[HttpCall, ...]) -> dict[str, Any]:
    """Return the document."""
    # What calls take and give, by name and number.
    takes = {call.body.__name__: TypeAdapter(call.body) for call in calls if call.body is not None}
    gives = {str(number): TypeAdapter(call.gives) for number, call in enumerate(calls)}
    inputs: list[Any] = [(name, "validation", adapter) for name, adapter in takes.items()]
    inputs += [(number, "serialization", adapter) for number, adapter in gives.items()]
    shapes, more = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCE)
    definitions = _plain(more["$defs"] | {"Problem": _problem_schema()})
    for name in ("Leases", "Nack", "Extend"):
        definitions[name]["not"] = {"required": ["lease", "leases"]}
    paths: dict[str, dict[str, Any]] = {}
    for number, call in enumerate(calls):
        shape = _plain(shapes[(str(number), "serialization")])
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, shape)
    about = "Durable deadlines. job_ids are texts, times RFC 3339 in UTC, durations seconds."
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "toc gateway", "version": version("timeout-center"), "description": about},
        "paths": paths,
        "components": {"schemas": definitions, "securitySchemes": schemes},
        "security": [{"token": []}],
    }


@cache
def document_bytes(calls: tuple[HttpCall, ...]) -> bytes:
    """Return it as JSON. Nobody needs a token to ask for it, so it costs next to nothing."""
    return to_json(document(calls))


def _operation(call: HttpCall, shape: Any) -> dict[str, Any]:
    parameters = [
        _parameter("path", name, about, {"type": "string", "pattern": pattern}, required=True)
        for name, (about, pattern) in _PATH.items()
        if f"{{{name}}}" in call.path
    ]
    if call.query is not Nothing:
        schema = _plain(call.query.model_json_schema(ref_template=_REFERENCE))
        needed = schema.get("required", ())
        parameters += [
            _parameter("query", name, value.pop("description", ""), value, required=name in needed)
            for name, value in schema["properties"].items()
        ]
    if call.named:
        about = "Names the request: repeated within a day, it gets the first answer."
        text = {"type": "string", "minLength": 1, "maxLength": 255}
        parameters.append(_parameter("header", "Idempotency-Key", about, text))
    content = {"application/json": {"schema": shape}}
    if call.gives is bytes:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    done = {"description": "Done.", "content": content}
    replaced = {"200": {**done, "description": "Replaced."}} if call.takes_raw else {}
    operation: dict[str, Any] = {
        "operationId": f"{call.told.__module__.rpartition('.')[2]}_{call.told.__name__}",
        "summary": call.summary,
        "description": f"{getdoc(call.told)} Roles: {', '.join(sorted(call.access.roles))}.",
        "parameters": parameters,
        "responses": {str(call.status): done, **replaced, "default": _FAILED},
    }
    if call.body is not None:
        reference = {"$ref": _REFERENCE.format(model=call.body.__name__)}
        # JSON alone: beside another kind, generators choose wrongly. The description tells of raw bodies.
        operation["requestBody"] = {
            "required": not takes_nothing(call.body),
            "content": {"application/json": {"schema": reference}},
        }
    return operation


def _parameter(
    place: str, name: str, about: str, schema: dict[str, Any], *, required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "description": about, "schema": schema}


def _plain(node: Any) -> Any:
    """Return schemas as generators of clients need them: named by their keys alone, without titles that
    collide, and with fields that may be left out even though they have a default."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: _plain(value) for key, value in node.items() if key != "default"}
    if isinstance(found.get("title"), str):
        del found["title"]
    default = node.get("default")
    if default is not None and "description" in found and "efault" not in found["description"]:
        found["description"] += f" Default {default}."
    return found


def _problem_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "description": "RFC 9457",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string", "enum": sorted(kind.type for kind in KINDS)},
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "field": {"type": "string", "description": "The field that is wrong."},
            "errors": {"type": "array", "items": {"type": "object"}},
            "job_id": {"type": "string", "description": "The task that is concerned."},
            "outcome": {"type": "string", "description": "What came of a lease."},
        },
    }


# --- the page


@cache
def page(calls: tuple[HttpCall, ...]) -> bytes:
    """Return the page: every call with its parameters, and every problem. Loads nothing else."""
    frame = (files("toc.gateway") / "docs.html").read_text("utf-8")
    schemas = document(calls)["components"]["schemas"]
    rows = "".join(
        _call_row(call, document(calls)["paths"][call.path][call.method.lower()], schemas) for call in calls
    )
    problems = "".join(
        f'<tr id="{kind.name}"><td><code>{kind.type}</code></td><td>{kind.status}</td>'
        f"<td>{escape('. '.join([kind.title, *map(_meaning, kind.errors)]))}</td></tr>"
        for kind in sorted(KINDS, key=lambda kind: (kind.status, kind.name))
    )
    return frame.replace("{{calls}}", rows).replace("{{problems}}", problems).encode()


def _meaning(error: type[Exception]) -> str:
    return " ".join((error.__doc__ or "").replace("`", "").split()).removesuffix(".")


def _call_row(call: HttpCall, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    fields = [(one["name"], one["in"], one["description"]) for one in operation["parameters"]]
    if call.body is not None:
        properties = schemas[call.body.__name__].get("properties", {})
        fields += [(name, "body", _about(value)) for name, value in properties.items()]
    listed = "".join(
        f"<li><code>{escape(name)}</code> <small>{where}</small> {escape(about)}</li>"
        for name, where, about in fields
    )
    return (
        f'<section id="{operation["operationId"]}"><h3><code>{call.method} {escape(call.path)}</code></h3>'
        f"<p>{escape(operation['description'])}</p><ul>{listed}</ul></section>"
    )


def _about(value: dict[str, Any]) -> str:
    kinds = [one.get("type", "") for one in value.get("anyOf", [value])]
    shown = " or ".join(kind for kind in kinds if kind and kind != "null")
    return f"{shown}. {value.get('description', '')}".strip(". ")
