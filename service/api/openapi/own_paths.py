"""The part of the document about models' own paths, and about bodies without an envelope."""

import re
from collections.abc import Mapping
from typing import Any

from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.service.api.openapi.headers import Json
from inferpool.service.api.openapi.predict import answers_of, operation_of, shown_body

_JSON = "application/json"
_FORM = "multipart/form-data"
_DOCUMENT: Json = {"description": "Any JSON document: it is one instance as it stands."}
_VALUE: Json = {"description": "The model's value for it, as it stands."}
_ONE_FORM: Json = {
    "type": "object",
    "description": "The whole form is one instance: a text, JSON or a file in each field.",
    "additionalProperties": {"type": "string"},
}


def add_interfaces(
    paths: dict[str, Json],
    interfaces: Mapping[str, Interface],
    examples: Mapping[str, object] | None = None,
    *,
    has_jobs: bool = False,
) -> None:
    """Add what models say of themselves to the path items of `/predict`; see `own_path_items`."""
    allow_documents(paths, interfaces)
    paths |= own_path_items(interfaces, examples, has_jobs=has_jobs)


def own_path_items(
    interfaces: Mapping[str, Interface],
    examples: Mapping[str, object] | None = None,
    *,
    has_jobs: bool = False,
) -> dict[str, Json]:
    """Return the path items of the paths that models have of their own.

    Args:
        interfaces: How clients speak to each model where that is not as usual.
        examples: An instance of each model that shows one.
        has_jobs: Calls to these may become jobs.
    """
    examples = examples or {}
    items: dict[str, Json] = {}
    for name, interface in interfaces.items():
        if interface.path:
            shown: Json = {}
            if name in examples:
                shown[name] = shown_body(name, examples[name], interface)
            operation = operation_of(
                "predict_at" + re.sub(r"\W", "_", interface.path),
                f"Predict with {name}, at its own path",
                [],
                interface.path,
                shown,
                answers_of(has_jobs=has_jobs),
            )
            _describe(operation, interface, shown)
            items[interface.path] = {"post": operation}
    return items


def allow_documents(paths: Mapping[str, Json], interfaces: Mapping[str, Interface]) -> None:
    """Say at shared paths that models may take and give JSON without an envelope."""
    if all(interface.envelope for interface in interfaces.values()):
        return
    operations: Any = [item["post"] for item in paths.values()]
    for operation in operations:
        body, answer = _media_of(operation)
        body["schema"] = {"anyOf": [body["schema"], _DOCUMENT]}
        answer["schema"] = {"anyOf": [answer["schema"], _VALUE]}


def _describe(operation: Any, interface: Interface, shown: Json) -> None:
    """Describe the bodies and answers of one model."""
    body, answer = _media_of(operation)
    if not interface.envelope:
        body |= {"schema": _DOCUMENT, "examples": shown}
        answer |= {"schema": _VALUE, "examples": {}}
    if interface.form != USUAL_INTERFACE.form:
        operation["requestBody"]["content"][_FORM] = {"schema": _ONE_FORM}


def _media_of(operation: Any) -> tuple[Json, Json]:
    """Return what an operation says of its JSON body and of its answer in JSON."""
    body: Json = operation["requestBody"]["content"][_JSON]
    answer: Json = operation["responses"]["200"]["content"][_JSON]
    return body, answer
