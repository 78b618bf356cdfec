"""The API's documentation of calls that rank and classify texts."""

import json
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI

from inferpool.service.parts.texts.ranking_routes import ranking_router
from tests.service.api.fakes import call, endpoint, post
from tests.service.parts.texts.test_classify import classifier
from tests.service.parts.texts.test_rerank import ranker


def described(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of bodies and of answers by status."""
    app = FastAPI()
    app.include_router(ranking_router(int(path[2])))
    operation = app.openapi()["paths"][path]["post"]
    answers = {
        status: each["content"]["application/json"]["schema"]
        for status, each in operation["responses"].items()
        if status != "422"  # FastAPI's own
    }
    return operation["requestBody"]["content"]["application/json"], answers


BODIES = [
    ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}]}),
    ("/v2/rerank", {"query": "q", "documents": ["a", "b"], "rank_fields": ["x"], "top_n": 1}),
    ("/v1/classify", {"input": "a"}),
    ("/v1/classify", {"inputs": [{"text": "a", "pair": "b"}, "b"], "top_k": 2}),
]


def answered(path: str, body: object) -> httpx.Response:
    model = classifier(0, 1, num=2) if "classify" in path else ranker(0.5, 0.25)
    return post(endpoint(model), path, content=json.dumps(body).encode())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_bodies_and_answers_are_as_the_documentation_says(path: str, body: object) -> None:
    bodies, answers = described(path)
    jsonschema.validate(body, bodies["schema"])
    answer = answered(path, body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), answers["200"])
    refusal = answered(path, {"nothing": 1})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"nothing": 1}, bodies["schema"])
    jsonschema.validate(refusal.json(), answers[str(refusal.status_code)])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/v1/classify"])
def test_the_example_of_a_body_is_answered(path: str) -> None:
    bodies, _ = described(path)
    jsonschema.validate(bodies["example"], bodies["schema"])
    assert answered(path, bodies["example"]).status_code == 200


def test_a_path_that_only_resembles_a_calls_is_not_found() -> None:
    app = FastAPI()
    app.include_router(ranking_router(2))
    assert call(app, "POST", "/v2/rerank/x").status_code == 404
