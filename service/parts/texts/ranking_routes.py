"""Describes calls that rank and classify texts in the API's documentation. Main process only.

The exchange answers the calls themselves, so that they never come to these routes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter

from inferpool.service.parts.texts.classify import (
    MAX_TEXTS,
    ClassifyRequest,
    CohereAnswer,
    TextClasses,
)
from inferpool.service.parts.texts.cohere import CallError
from inferpool.service.parts.texts.rerank import (
    MAX_DOCUMENTS,
    MAX_FIELDS,
    Ranking,
    RerankRequest,
)
from inferpool.service.parts.texts.routes import describe, schema_of

_TEXT = {"type": "string", "minLength": 1}
_RANKED = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
    ]
}
_DOCUMENTS = {"type": "array", "items": _RANKED, "minItems": 1, "maxItems": MAX_DOCUMENTS}
_FIELDS = {
    "description": "The members of documents that are compared; a line for each.",
    "type": ["array", "null"],
    "items": {"type": "string"},
    "minItems": 1,
    "maxItems": MAX_FIELDS,
}
_CLASSIFIED = {
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "required": ["text"],
            "properties": {"text": {"type": "string"}, "pair": {"type": "string"}},
            "additionalProperties": False,
        },
    ]
}
_TEXTS = {
    "anyOf": [
        *_CLASSIFIED["anyOf"],
        {"type": "array", "items": _CLASSIFIED, "minItems": 1, "maxItems": MAX_TEXTS},
    ]
}
_NEITHER = {"type": "null", "description": "Not supported: a model has its own labels."}


def ranking_router(version: int) -> APIRouter:
    """Return routes that describe the calls below `/v1` or `/v2`."""
    router = APIRouter(tags=["texts"])
    error = answer_schema(CallError)
    describe(
        router,
        f"/v{version}/rerank",
        name=f"rerank_v{version}",
        summary=f"Order documents, as version {version} of Cohere's API has it, and Jina's",
        description="The best first. Each document and the query are an instance of a reranker. "
        "If one document fails, the whole call does.",
        body=schema_of(RerankRequest, query=_TEXT, documents=_DOCUMENTS, rank_fields=_FIELDS),
        example={"query": "what is a cat?", "documents": ["an animal", "a car"], "top_n": 1},
        answer=answer_schema(Ranking),
        error=error,
    )
    if version == 1:
        body = schema_of(
            ClassifyRequest,
            input=_TEXTS,
            inputs=_TEXTS,
            **dict.fromkeys(("labels", "classifier_id", "examples", "preset"), _NEITHER),
        )
        one_of = [{"required": ["input"]}, {"required": ["inputs"]}]
        describe(
            router,
            "/v1/classify",
            name="classify_texts",
            summary="Labels of texts, as the APIs of Jina and Cohere have it",
            description="By a classifier, the best label first. A call with `input` is answered "
            "as Jina and vLLM do, and one with `inputs` as Cohere does. If one text fails, the "
            "whole call does.",
            body={**body, "oneOf": one_of},
            example={"input": ["what a day", "oh no"]},
            answer={"anyOf": [answer_schema(TextClasses), answer_schema(CohereAnswer)]},
            error=error,
        )
    return router


def answer_schema(answer: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the JSON schema of an answer, with those of its parts in their places."""
    schemas = msgspec.json.schema(answer)["$defs"]

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        if (name := value.get("$ref")) is not None:
            return inlined(schemas[name.rpartition("/")[2]])
        return {key: inlined(each) for key, each in value.items()}

    found: Mapping[str, Any] = inlined(schemas[answer.__name__])
    return found
