"""Describes calls about texts in the API's documentation. Runs in the main process's event loop.

The exchange answers the calls themselves, so that they never come to these routes.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException

from inferpool.service.parts.texts.embeddings import MAX_INPUTS, EmbeddingsRequest

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUT = {
    "description": "A text, or ids of its tokens; or a list of either.",
    "anyOf": [
        _TEXT,
        _IDS,
        *({"type": "array", "items": each, "minItems": 1, "maxItems": MAX_INPUTS}
          for each in (_TEXT, _IDS)),
    ],
}  # fmt: skip
_COUNT = {"type": "integer", "minimum": 0}
_VECTOR = {
    "type": "object",
    "required": ["object", "index", "embedding"],
    "properties": {
        "object": {"const": "embedding"},
        "index": _COUNT,
        "embedding": {
            "description": "A list of numbers; or float32 in base64, with the least byte first.",
            "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}],
        },
    },
}
_VECTORS = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": _VECTOR},
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {
                    "type": "string",
                    "description": "What was wrong, where, and what to do.",
                },
                "type": {"type": "string", "description": "The kind, in OpenAI's words."},
                "param": {"type": ["string", "null"], "description": "The argument at fault."},
                "code": {"type": "string", "description": "A stable name."},
                "request_id": {"type": "string"},
            },
        }
    },
}
_REFUSED = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504)


def texts_router() -> APIRouter:
    """Return routes that describe calls."""
    router = APIRouter(tags=["texts"])
    describe(
        router,
        "/v1/embeddings",
        name="create_embeddings",
        summary="Vectors of texts, as OpenAI's API has it",
        description="Like `/predict`, by an encoder. If one input fails, the whole call does.",
        body=schema_of(EmbeddingsRequest, input=_INPUT),
        example={"input": ["hello world", "good morning"], "encoding_format": "float"},
        answer=_VECTORS,
    )
    return router


def describe(
    router: APIRouter,
    path: str,
    *,
    name: str,
    summary: str,
    description: str,
    body: Mapping[str, Any],
    example: object,
    answer: Mapping[str, Any],
    error: Mapping[str, Any] = _ERROR,
) -> None:
    """Describe calls to a path.

    Args:
        router: Gets the route.
        path: The path of the calls.
        name: The operation's name in the document, which no other has.
        summary: One line for people.
        description: More for people.
        body: The JSON schema of bodies.
        example: A body.
        answer: The JSON schema of answers.
        error: The JSON schema of errors.
    """
    router.add_api_route(
        path,
        _not_here,
        methods=["POST"],
        name=name,
        summary=summary,
        description=description,
        response_model=None,
        responses={200: _content(answer, f"{summary}."), **errors(*_REFUSED, schema=error)},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": body, "example": example}},
            }
        },
    )


def errors(*statuses: int, schema: Mapping[str, Any] = _ERROR) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of error answers by their status, usually in OpenAI's form."""
    return {status: _content(schema, HTTPStatus(status).phrase) for status in statuses}


def schema_of(request: type[msgspec.Struct], **properties: object) -> dict[str, Any]:
    """Return the JSON schema of a body, with some of its properties given."""
    schema: dict[str, Any] = msgspec.json.schema(request)["$defs"][request.__name__]
    schema["properties"] |= properties
    return schema


def _content(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


async def _not_here() -> None:
    """Refuse a path that only resembles that of a call: the exchange has answered all others."""
    raise HTTPException(404)
