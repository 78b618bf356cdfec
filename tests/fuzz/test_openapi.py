"""A running service against its own OpenAPI document."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.running import Running


def no_server_error(
    _: object, answer: schemathesis.Response, case: "schemathesis.Case[Any]"
) -> None:
    """Fail on a 5xx, but for a 504 to a client that sent a deadline."""
    is_late = answer.status_code == 504 and "X-Timeout-Ms" in case.headers
    assert answer.status_code < 500 or is_late, answer.text


CHECKS = [
    no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


OPERATIONS = [
    "POST /predict",
    "POST /predict/{model}",
    "POST /predict/{model}/versions/{version}",
    "GET /jobs",
    "POST /jobs",
    "GET /jobs/{id}",
    "PUT /jobs/{id}",
    "DELETE /jobs/{id}",
    "GET /jobs/{id}/result",
    "GET /jobs/{id}/events",
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /metrics",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /v1/classify",
    "POST /v1/models/{model}:predict",
    "POST /v1/models/{model}/versions/{version}:predict",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /v1/models/{model}/versions/{version}",
    "POST /v2/models/{model}/infer",
    "POST /v2/models/{model}/versions/{version}/infer",
    "GET /v2",
    "GET /v2/health/live",
    "GET /v2/health/ready",
    "GET /v2/models",
    "GET /v2/models/stats",
    *(
        f"GET /v2/models/{{model}}{version}{what}"
        for version in ("", "/versions/{version}")
        for what in ("", "/ready", "/config", "/stats")
    ),
    "POST /v2/repository/index",
]


REFUSING = ("POST /predict", "POST /v1", "POST /v2/models", "POST /v2/rerank")
"""Beginnings of operations that are also given what does not fit their schema."""


@pytest.fixture(scope="module")
def operations(target: Running) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    return {operation.label: operation for operation in found}


def test_every_operation_is_tried(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted([*OPERATIONS, "GET /events"])  # which has no end


@pytest.mark.parametrize(
    ("name", "model"),
    [("image", "decoder"), ("numbers", "echo"), ("texts", "echo"), ("inputs", "two")],
)
def test_the_examples_are_answered_as_documented(
    target: Running, operations: dict[str, Any], name: str, model: str
) -> None:
    document = httpx.get(f"{target.url}/openapi.json").json()
    body = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["examples"]) == {"image", "numbers", "texts", "inputs"}
    value = body["examples"][name]["value"]
    answer = httpx.post(f"{target.url}/predict/{model}", json=value)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["predictions"]) == len(value["instances"])
    operations["POST /predict"].validate_response(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
    + [(label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith(REFUSING)],
)
def test_the_service_does_as_its_document_says(
    operations: dict[str, Any], label: str, mode: GenerationMode
) -> None:
    @settings(
        max_examples=30 if "predict" in label else 10,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operations[label].as_strategy(generation_mode=mode))
    def run(case: "schemathesis.Case[Any]") -> None:
        case.call_and_validate(checks=CHECKS, timeout=90)

    run()
