"""`/info` and `/tei/{model}/info`, and descriptions of TEI's calls. The main process's event loop.

Members of `Info` are those of TEI's router (`router/src/lib.rs` of
huggingface/text-embeddings-inference, commit 0d124dc).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from inferpool.models.spec import Interface, TextFacts
from inferpool.service.api.asgi import answer
from inferpool.service.api.errors import CALL_KEY
from inferpool.service.api.exchange import DEFAULT_MODEL
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import UnavailableError, UnknownModelError
from inferpool.service.parts.tei.answers import ONLY_LABEL, WrongTaskError
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.versions import version_of

_Json = dict[str, Any]
_POOLINGS = {"last": "last_token"}
"""TEI's names of poolings that have another one here."""
_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""TEI's names of dtypes, by what names of presets end with."""
_ERROR = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "string", "description": "What was wrong, where, and what to do."},
        "error_type": {
            "type": "string",
            "enum": ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"],
        },
    },
}
_TEXT: _Json = {"type": "string"}
_FLAG: _Json = {"type": "boolean"}
_INPUTS: _Json = {
    "description": "A text, ids of tokens, or a list of texts and lists of ids.",
    "anyOf": [_TEXT, {"type": "array", "items": {}, "minItems": 1}],
}
_TRUNCATION: _Json = {
    "truncate": {**_FLAG, "description": "Cut texts that are too long, which is the default."},
    "truncation_direction": {"type": "string", "enum": ["Left", "Right"], "default": "Right"},
}
_PROMPTED: _Json = {**_TRUNCATION, "prompt_name": _TEXT}
_LIST: _Json = {"type": "array", "items": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TeiCall:
    """The documentation of one call."""

    summary: str
    required: Sequence[str]
    properties: Mapping[str, Any]
    example: Mapping[str, Any]


_CALLS: Mapping[str, TeiCall] = {
    "embed": TeiCall(
        summary="Vectors of texts",
        required=["inputs"],
        properties={
            "inputs": _INPUTS,
            **_PROMPTED,
            "normalize": {**_FLAG, "default": True},
            "dimensions": {"type": "integer", "minimum": 1},
        },
        example={"inputs": ["What is a queue?"]},
    ),
    "embed_all": TeiCall(
        summary="Vectors of all tokens of texts",
        required=["inputs"],
        properties={"inputs": _INPUTS, **_PROMPTED},
        example={"inputs": "What is a queue?"},
    ),
    "embed_sparse": TeiCall(
        summary="Sparse vectors, which no model here has",
        required=["inputs"],
        properties={"inputs": _INPUTS, **_PROMPTED},
        example={"inputs": "What is a queue?"},
    ),
    "similarity": TeiCall(
        summary="How alike one sentence and others are",
        required=["inputs"],
        properties={
            "inputs": {
                "type": "object",
                "required": ["source_sentence", "sentences"],
                "properties": {
                    "source_sentence": _TEXT,
                    "sentences": {"type": "array", "items": _TEXT, "minItems": 1},
                },
            },
            "parameters": {"type": "object", "properties": _PROMPTED},
        },
        example={"inputs": {"source_sentence": "A queue", "sentences": ["A line", "A cat"]}},
    ),
    "rerank": TeiCall(
        summary="How well texts answer a query, the best first",
        required=["query", "texts"],
        properties={
            "query": _TEXT,
            "texts": {"type": "array", "items": _TEXT, "minItems": 1},
            **_TRUNCATION,
            "raw_scores": {**_FLAG, "default": False},
            "return_text": {**_FLAG, "default": False},
        },
        example={"query": "What is a queue?", "texts": ["A line", "A cat"]},
    ),
    "predict": TeiCall(
        summary="Labels of texts with their scores",
        required=["inputs"],
        properties={
            "inputs": {
                "description": "A text, a pair of texts, or a list of [text] and [text, text].",
                "anyOf": [_TEXT, _LIST],
            },
            **_TRUNCATION,
            "raw_scores": {**_FLAG, "default": False},
        },
        example={"inputs": [["I like it."], ["I don't."]]},
    ),
    "tokenize": TeiCall(
        summary="Tokens of texts",
        required=["inputs"],
        properties={
            "inputs": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]},
            "add_special_tokens": {**_FLAG, "default": True},
            "prompt_name": _TEXT,
        },
        example={"inputs": "What is a queue?"},
    ),
    "decode": TeiCall(
        summary="Texts of tokens",
        required=["ids"],
        properties={
            "ids": {"description": "Ids of tokens, or a list of such lists.", **_LIST},
            "skip_special_tokens": {**_FLAG, "default": True},
        },
        example={"ids": [101, 2054, 102]},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TeiInfo:
    """A model and the limits of its calls, in the words of Text Embeddings Inference."""

    model_id: str
    """The name of the model here."""
    model_sha: str | None = None
    """Always null."""
    model_dtype: str
    """The dtype that its network computes with."""
    served_model_name: str
    model_type: Mapping[str, Mapping[str, Any]]
    """`embedding` with its `pooling`; or `classifier` or `reranker` with the names of its
    labels."""
    max_concurrent_requests: int
    """The most inputs that may wait."""
    max_input_length: int
    """The most tokens of a text."""
    max_batch_tokens: int
    """The most tokens of a batch, with those that fill it up."""
    max_batch_requests: int | None
    """The most texts of a batch."""
    max_client_batch_size: int
    """The most inputs of one call."""
    auto_truncate: bool = True
    """Longer texts are cut unless the call says otherwise."""
    tokenization_workers: int
    """The workers of the model; each has a tokenizer."""
    version: str
    """The version of inferpool."""
    sha: str | None = None
    """Always null."""
    docker_label: str | None = None
    """Always null."""


def info_router(entries: Mapping[str, ModelVersion], settings: Settings) -> APIRouter:
    """Return the routes at the root; `entries` are the versions that calls can ask for."""
    router = APIRouter(tags=["texts"])

    @router.get("/info", summary="The default model, for clients of TEI", responses=_errors(404))
    async def show_tei_info() -> TeiInfo:
        """The default model and the limits of calls to it."""
        return _info(entries, settings.default_model, settings)

    for name, described in _CALLS.items():
        if name != "predict":  # which is described as ours
            _describe(router, f"/{name}", name, described)
    return router


def root_router() -> APIRouter:
    """Return the route of calls to / for the default model."""
    return APIRouter(routes=[_any_task("/")])


def tei_router(entries: Mapping[str, ModelVersion], settings: Settings) -> APIRouter:
    """Return the routes below `/tei`; `entries` are the versions that calls can ask for."""
    router = APIRouter(tags=["texts"])

    @router.get(
        "/tei/{model}/info", summary="A model, for clients of TEI", responses=_errors(404, 424)
    )
    async def show_tei_info_of(model: str) -> TeiInfo:
        """A model and the limits of calls to it."""
        return _info(entries, model, settings)

    for name, described in _CALLS.items():
        _describe(router, f"/tei/{{model}}/{name}", f"{name}_of", described)
    router.routes.append(_any_task("/tei/{model}"))
    return router


def _any_task(path: str) -> Route:
    """Return the route of calls that are for the task of a model: / and /tei/NAME."""
    return Route(path, _AnyTask(), methods=["POST"], include_in_schema=False)


class _AnyTask:
    """Hands a call to the exchange, which checks its key, by a path of its own.

    The exchange cannot have the path itself, since GET there is another call.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        path = scope[CALL_KEY].path
        path = f"/tei/{DEFAULT_MODEL}" if path == "/" else path.removesuffix("/")
        await answer(scope["app"].predict, f"{path}/any_task", scope, receive, send)


def _errors(*statuses: int) -> dict[int | str, _Json]:
    content = {"application/json": {"schema": _ERROR}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


_REFUSED = _errors(400, 401, 403, 404, 405, 408, 413, 415, 422, 424, 429, 500, 503, 504)


def _describe(router: APIRouter, path: str, name: str, described: TeiCall) -> None:
    """Describe a call; it never comes here, since the exchange answers it."""
    schema = {
        "type": "object",
        "required": described.required,
        "properties": described.properties,
    }
    more: _Json = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": described.example}},
        }
    }
    if "{model}" in path:
        more["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    router.add_api_route(
        path,
        _not_here,
        methods=["POST"],
        name=f"tei_{name}",
        summary=described.summary,
        description="As Text Embeddings Inference has it. If one input fails, the call does.",
        response_model=list[Any],
        responses=_REFUSED,
        openapi_extra=more,
    )


async def _not_here() -> None:
    """Refuse a path that only resembles that of a call: the exchange has answered all others."""
    raise HTTPException(404)


def _info(entries: Mapping[str, ModelVersion], name: str | None, settings: Settings) -> TeiInfo:
    """Return the facts about a model of texts.

    Raises:
        UnknownModelError: There is no model of that name, or no default one.
        UnavailableError: It has not loaded yet.
        WrongTaskError: It is not about texts.
    """
    entry = None if name is None else entries.get(name)
    if entry is None or name is None:
        there = ", ".join(each for each in entries if "/" not in each) or "none"
        what = "no model is the default" if name is None else f"no model is called {name[:80]!r}"
        raise UnknownModelError(f"{what}; there are: {there}")
    if entry.interface.media_types is None:
        raise UnavailableError(f"{name} is not ready: {entry.pool.reason}", retry_after_s=1)
    facts = entry.interface.text
    if facts is None:
        raise WrongTaskError("model is not about texts")
    num_texts = entry.settings.batch_size
    return TeiInfo(
        model_id=name,
        model_dtype=_dtype_of(entry),
        served_model_name=name,
        model_type=_type_of(entry.interface, facts),
        max_concurrent_requests=entry.pool.dispatcher.max_queue_length,
        max_input_length=facts.max_tokens,
        max_batch_tokens=entry.settings.max_batch_tokens or facts.max_tokens * num_texts,
        max_batch_requests=num_texts,
        max_client_batch_size=settings.max_instances_per_request,
        tokenization_workers=len(entry.pool.slots),
        version=version_of(),
    )


def _type_of(interface: Interface, facts: TextFacts) -> Mapping[str, Mapping[str, Any]]:
    if facts.task == "embedding":
        return {"embedding": {"pooling": _POOLINGS.get(facts.pooling, facts.pooling)}}
    labels = interface.labels or (ONLY_LABEL,)
    names = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    return {"reranker" if facts.task == "reranking" else "classifier": names}


def _dtype_of(entry: ModelVersion) -> str:
    """Return the dtype that a model's network computes with, by the preset of its workers."""
    for slot in entry.pool.slots:
        speed = slot.config.chosen or (slot.handle.ready.speed if slot.handle else None)
        if speed is not None:
            return next((_HALVES[end] for end in _HALVES if speed.preset.endswith(end)), "float32")
    return "float32"
