"""`/v1/models`: the models and whether they are ready. Runs in the main process's event loop.

Clients of KServe, of TensorFlow Serving and of OpenAI ask here. One object has what each reads;
errors have OpenAI's form, since KServe's client shows any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any, Literal

import psutil
from fastapi import APIRouter
from starlette.exceptions import HTTPException

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import UnavailableError, UnknownModelError
from inferpool.service.parts.texts.routes import errors as errors_of_openai

_Responses = dict[int | str, dict[str, Any]]
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "What was wrong, where, and what to do."},
        "code": {"type": "string", "description": "A stable name, as for `/predict`."},
        "request_id": {"type": "string"},
    },
}


def _errors(*statuses: int) -> _Responses:
    content = {"application/json": {"schema": _ERROR}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


_UNREADY = errors_of_openai(404, 503)
_REFUSED = _errors(400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504)
_ROWS = {
    "type": "object",
    "required": ["instances"],
    "properties": {
        "instances": {"type": "array", "items": {}, "minItems": 1},
        "parameters": {"type": "object"},
        "signature_name": {"type": "string", "enum": ["serving_default"]},
    },
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model, in the words of OpenAI."""

    id: str
    """Its name; a call may ask for it."""
    created: int
    """When the service started, in seconds since 1970."""
    object: Literal["model"] = "model"
    owned_by: str = "inferpool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """All models."""

    models: Sequence[str]
    """Their names, for clients of KServe."""
    data: Sequence[ServedModel]
    """The same, for clients of OpenAI."""
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatus:
    """A version of a model and its state, in the words of TensorFlow Serving."""

    version: str
    state: Literal["LOADING", "AVAILABLE"]
    status: Mapping[str, str] = field(
        default_factory=lambda: {"error_code": "OK", "error_message": ""}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReadiness(ServedModel):
    """A model, or a version of one, that is ready."""

    name: str
    ready: bool
    """Always true; if it is not ready, the answer is 503."""
    model_version_status: Sequence[VersionStatus]
    """For clients of TensorFlow Serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The answers of a model."""

    predictions: Sequence[Any]
    """One for each instance, in their order."""


def v1_router(entries: Mapping[str, ModelVersion]) -> APIRouter:
    """Return the routes; `entries` are the versions that calls can ask for, as in a catalog."""
    router = APIRouter(tags=["kserve"])

    @router.get("/v1/models", summary="The models, for clients of KServe and of OpenAI")
    async def list_served() -> ServedModels:
        """The names of all models, ready or not."""
        names = _names(entries)
        data = [ServedModel(id=name, created=_started()) for name in names]
        return ServedModels(models=names, data=data)

    @router.get("/v1/models/{model}", summary="Whether a model is ready", responses=_UNREADY)
    async def show_served(model: str) -> ModelReadiness:
        """200 while a worker takes calls for it, and 503 otherwise."""
        return _served(entries, model, model)

    @router.get(
        "/v1/models/{model}/versions/{version}",
        summary="Whether a version of a model is ready",
        responses=_UNREADY,
    )
    async def show_served_version(model: str, version: str) -> ModelReadiness:
        """The same for one version."""
        return _served(entries, model, f"{model}/versions/{version}")

    _describe_predict(router)
    return router


def _describe_predict(router: APIRouter) -> None:
    """Describe predictions; calls never come here, since the exchange answers them."""
    body = {"schema": _ROWS, "example": {"instances": ["a", [1, 2]]}}
    for ending, version in (("", ""), ("_of_version", "/versions/{version}")):
        path_parameters = ["model", "version"] if version else ["model"]
        router.add_api_route(
            f"/v1/models/{{model}}{version}:predict",
            _not_here,
            methods=["POST"],
            name=f"predict_v1{ending}",
            summary="Predict, as KServe's version 1 says it",
            description="Like `/predict` with JSON. If one instance fails, the whole call does.",
            response_model=Predictions,
            responses=_REFUSED,
            openapi_extra={
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in path_parameters
                ],
                "requestBody": {"required": True, "content": {"application/json": body}},
            },
        )


async def _not_here() -> None:
    """Refuse a path that only resembles that of a call: the exchange has answered all others."""
    raise HTTPException(404)


@cache
def _started() -> int:
    return int(psutil.Process().create_time())


def _names(entries: Mapping[str, ModelVersion]) -> list[str]:
    return [name for name in entries if "/" not in name]


def _served(entries: Mapping[str, ModelVersion], model: str, key: str) -> ModelReadiness:
    """Return a version of a model that is ready.

    Raises:
        UnknownModelError: There is none.
        UnavailableError: It is not ready.
    """
    entry = entries.get(key)
    if entry is None:
        there = ", ".join(_names(entries)) or "none"
        raise UnknownModelError(f"no model is called {key[:80]!r}; there are: {there}")
    if not entry.pool.is_ready:
        raise UnavailableError(f"{key} is not ready: {entry.pool.reason}", retry_after_s=1)
    versions = [each for each in entries.values() if each.name == model]
    shown = {each.number: each for each in versions if key in (model, each.path)}
    return ModelReadiness(
        id=key,
        created=_started(),
        name=model,
        ready=True,
        model_version_status=[
            VersionStatus(
                version=str(number), state="AVAILABLE" if each.pool.is_ready else "LOADING"
            )
            for number, each in sorted(shown.items(), reverse=True)
        ],
    )
