"""The whole document: FastAPI's own, and everything that FastAPI does not know."""

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from inferpool.models.spec import Interface
from inferpool.service.api.auth import KEY_MEANINGS, Access, policy_of
from inferpool.service.api.openapi import predict, problems
from inferpool.service.api.openapi.headers import (
    COMMON,
    COMMON_PARAMETERS,
    EXAMPLES,
    HEADERS,
    PARAMETERS,
    Json,
    answer_headers,
)
from inferpool.service.api.openapi.own_paths import add_interfaces
from inferpool.service.api.openapi.problems import COMMON_STATUSES, refer_to

TAGS: Sequence[Mapping[str, str]] = (
    {"name": "predict", "description": "Predictions, one instance or many at a time."},
    {"name": "health", "description": "For orchestrators, balancers, Prometheus and people."},
    {"name": "kserve", "description": "Version 1 of KServe's protocol, as its clients speak it."},
    {"name": "texts", "description": "Vectors, ranks and classes of texts."},
    {"name": "open inference", "description": "Version 2 of the Open Inference Protocol."},
    {"name": "jobs", "description": "Predictions that outlive their connection."},
    {
        "name": "admin",
        "description": "Operations on a running service; they exist only with an admin key. "
        "Each action leaves a line in the log.",
    },
)

_MAKES_JOB = ("create_job", "put_job")
_OWN_HEADERS: Mapping[str, str] = {
    "list_jobs": "Link",
    "show_job": "Retry-After",
    "show_result": "X-Model-Version",
}
"""The header that the answer of an operation may have besides the common ones."""
_VALIDATION = ("HTTPValidationError", "ValidationError")
"""FastAPI's own form of errors, which the service does not use."""


def complete(
    schema: dict[str, Any],
    restricted: frozenset[Access],
    *,
    models: Sequence[str] | None,
    default: str | None,
    modules: frozenset[ModuleType] = frozenset(),
    examples: Mapping[str, object] | None = None,
    interfaces: Mapping[str, Interface] | None = None,
    bodies: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Complete FastAPI's document of its routes, in place, and return it.

    `restricted` are the kinds of calls that need a key; `models` is None if there is no `/predict`;
    `modules` have the dataclasses of the routes' answers.
    `examples` has an instance of each model that shows one, `interfaces` how clients speak to those
    that are not as usual, `bodies` the schema of the body of each
    operation that reads it by itself.
    """
    paths: dict[str, Any] = schema["paths"]
    answers = EXAMPLES["answers"]
    answers["events"]["health"] = answers["health"]
    for path, operations in paths.items():
        for operation in operations.values():
            example = answers.get(operation["operationId"])
            _complete_operation(operation, path, example)
            if name := _OWN_HEADERS.get(operation["operationId"]):
                operation["responses"]["200"]["headers"] |= answer_headers(name)
            if operation["operationId"] in _MAKES_JOB:
                _complete_making(operation)
            if bodies and (body := bodies.get(operation["operationId"])):
                operation["requestBody"] = _body(body, operation["operationId"])
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _VALIDATION:
        schemas.pop(name, None)
    for name, texts in _texts_of_fields(modules).items():
        for field, text in texts.items():
            if field in schemas.get(name, {}).get("properties", {}):
                schemas[name]["properties"][field]["description"] = text
    if models is not None:
        predicting = predict.predict_paths(
            models, default, examples, interfaces=interfaces, has_jobs="JobInfo" in schemas
        )
        add_interfaces(predicting, interfaces or {}, examples, has_jobs="JobInfo" in schemas)
        schema["paths"] = {**predicting, **paths}
        schemas |= predict.SCHEMAS
    schemas |= problems.SCHEMAS
    components["responses"] = problems.responses()
    components["parameters"] = dict(PARAMETERS)
    components["headers"] = dict(HEADERS)
    _add_security(schema, restricted)
    operations = [each for item in schema["paths"].values() for each in item.values()]
    used = {tag for operation in operations for tag in operation.get("tags", ())}
    schema["tags"] = [dict(tag) for tag in TAGS if tag["name"] in used]
    _drop_unused(schema)
    schema.setdefault("servers", [{"url": "/", "description": "This host."}])
    return schema


@lru_cache
def _texts_of_fields(modules: frozenset[ModuleType]) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings under the fields of our dataclasses, by class and field.

    pydantic could do this too, but at import: it would add 0.1 s to the start.
    """
    found: dict[str, dict[str, str]] = {}
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if not isinstance(node, ast.ClassDef):
                continue
            texts: dict[str, str] = {}
            found[node.name] = texts
            for base in node.bases:
                texts |= found.get(ast.unparse(base), {})
            for field, after in pairwise(node.body):
                match field, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts[name] = " ".join(text.split())
    return found


def _complete_operation(operation: dict[str, Any], path: str, example: object) -> None:
    """Add headers, error answers and an example to one of FastAPI's operations."""
    taken = [{"$ref": f"#/components/parameters/{name}"} for name in COMMON_PARAMETERS]
    operation["parameters"] = [*operation.get("parameters", ()), *taken]
    responses: dict[str, Any] = operation["responses"]
    statuses = {int(status) for status in responses}
    errors = {status for status in statuses if status >= 400}.union(COMMON_STATUSES)
    if policy_of(path) not in ("open", None):
        errors |= {401, 403}
    responses.pop("422", None)  # FastAPI's own
    answers = {key: each for key, each in responses.items() if int(key) < 400 or "content" in each}
    for answer in answers.values():
        if answer["description"] == "Successful Response":
            answer["description"] = f"{operation['summary']}."
        answer["headers"] = answer_headers(*COMMON) | answer.get("headers", {})
        for media in answer.get("content", {}).values():
            if "$ref" in media.get("schema", {}):
                media["schema"].pop("type", None)  # FastAPI says `string` for everything but JSON
            if example is not None:
                media["example"] = example
    operation["responses"] = refer_to(errors) | answers


def _complete_making(operation: dict[str, Any]) -> None:
    """Add body and headers to an operation that makes a job."""
    operation["requestBody"] = predict.job_body({})
    names = ("Prefer", "IdempotencyKey", "XPriority")
    operation["parameters"] += [{"$ref": f"#/components/parameters/{name}"} for name in names]
    operation["responses"]["202"]["headers"] |= answer_headers(
        "Location", "Preference-Applied", "Retry-After"
    )


def _body(schema: object, operation: str) -> Json:
    content = {"schema": schema, "example": EXAMPLES["bodies"][operation]}
    return {"required": True, "content": {"application/json": content}}


def _drop_unused(schema: dict[str, Any]) -> None:
    """Leave out components of routes that are not served here, such as those of /admin."""
    components = schema["components"]
    text = ""
    while text != (text := json.dumps([schema["paths"], components])):
        for kind in ("schemas", "responses", "headers", "parameters"):
            named = components[kind]
            components[kind] = {
                name: each
                for name, each in named.items()
                if f'"#/components/{kind}/{name}"' in text
            }


def _add_security(schema: dict[str, Any], restricted: frozenset[Access]) -> None:
    """Say which operations need which keys, and how one is sent."""
    schemes: dict[str, Json] = {}
    for access in (each for each in KEY_MEANINGS if each in restricted):  # the most needed first
        about = f"One of {KEY_MEANINGS[access]}"
        schemes[f"{access}_bearer"] = {"type": "http", "scheme": "bearer", "description": about}
        schemes[f"{access}_header"] = {
            "type": "apiKey",
            "in": "header",
            "name": "X-API-Key",
            "description": about,
        }
    if schemes:
        schema["components"]["securitySchemes"] = schemes
    for path, operations in schema["paths"].items():
        policy = policy_of(path) or "predict"  # none has one but models' own paths
        is_open = policy == "open" or policy not in restricted
        needed: list[Json] = [{f"{policy}_bearer": []}, {f"{policy}_header": []}]
        for operation in operations.values():
            operation["security"] = [] if is_open else needed
