"""All routes of the Open Inference Protocol, version 2, but calls to a model.

They are below `/v2`, with Triton's extensions for statistics, configurations and the repository.
Runs in the main process's event loop.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from inferpool.service.api.errors import NotFoundError
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.errors import BadRequestError
from inferpool.service.parts.admin.bodies import body_of, object_in
from inferpool.service.parts.admin.routes import record
from inferpool.service.parts.open_inference.metadata import (
    ModelMetadata,
    ServedConfig,
    ServerMetadata,
)
from inferpool.service.parts.open_inference.repository import IndexEntry, Repository
from inferpool.service.parts.open_inference.statistics import StatisticsList

_MAX_BODY_BYTES = 64 * 1024

_Responses = dict[int | str, dict[str, Any]]
_PROBLEM = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
"""The content of errors: KServe's client shows the message of no other type."""


def _error(status: int, description: str) -> _Responses:
    return {status: {"description": description, "content": _PROBLEM}}


_NO_MODEL = _error(404, "No such model, or no such version of it.")
_UNREADY = _error(503, "It is not ready.")
_READINESS = {"allOf": [{"$ref": "#/components/schemas/ServerReady"}], "required": ["error"]}
_SERVER_UNREADY: _Responses = {
    503: {
        "description": "It is not ready.",
        "content": {"application/json": {"schema": _READINESS}},
    }
}
_BAD_BODY = _error(400, "The body cannot be read, or has a parameter that is refused.") | _error(
    413, "The body is too large."
)
_BUSY = _error(409, "The model is being changed.")
_UNSAVED = _error(507, "The change cannot be kept for the next start.")
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
            "description": "With the batch first.",
        },
        "datatype": {"type": "string", "description": "As the metadata of the model says."},
        "parameters": {
            "type": "object",
            "description": "`binary_data_size` in the place of `data`: its bytes follow the JSON.",
        },
        "data": {
            "type": "array",
            "items": {},
            "description": "Row-major, nested or flat. `FP16` and `BF16` have no form in JSON.",
        },
    },
}
_INFER_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string", "description": "Comes back in the answer."},
        "parameters": {
            "type": "object",
            "description": "`priority`, `timeout` in microseconds, `binary_data_output`; others "
            "are the model's.",
        },
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": _NAMED,
            "description": "The outputs to answer with; all without it. The parameter "
            "`classification` asks for the best classes.",
        },
    },
}
_INFER_ANSWER = {
    "type": "object",
    "required": ["model_name", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
_INFER_EXAMPLE = {
    "id": "1",
    "inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}],
}
_ANSWER_EXAMPLE = {
    "model_name": "cats",
    "model_version": "1",
    "id": "1",
    "outputs": [{"name": "y", "shape": [1, 3], "datatype": "FP32", "data": [2.0, 4.0, 6.0]}],
}
_SERVER_EXAMPLE = {"name": "inferpool", "version": "1.0.0", "extensions": ["binary_tensor_data"]}
_OCTETS = {"type": "string", "format": "binary"}
_FILTER = {
    "type": "object",
    "properties": {"ready": {"type": "boolean", "description": "Only those that are ready."}},
}
_UNLOAD = {
    "type": "object",
    "properties": {
        "parameters": {
            "type": "object",
            "properties": {
                "unload_dependents": {
                    "type": "boolean",
                    "description": "Accepted; no model depends on another one.",
                }
            },
        }
    },
}
_LOAD = {
    "type": "object",
    "properties": {
        "parameters": {
            "type": "object",
            "maxProperties": 0,
            "description": "None: `config` and `file:` are refused.",
        }
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLive:
    """The event loop turns."""

    live: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """Says if this host should be sent requests."""

    ready: bool
    live: Literal[True] = True
    error: str = ""
    """Why it is not ready; not there if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """A model that is ready."""

    name: str
    ready: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The names of all models."""

    models: Sequence[str]


def v2_router(
    repository: Repository, report: Callable[[], HealthReport], *, has_operators: bool = True
) -> APIRouter:
    """Return the routes. The application that serves them checks the key.

    Args:
        repository: The models.
        report: Returns the state of the service now.
        has_operators: Someone has the key to load and unload models.
    """
    router = APIRouter(prefix="/v2", tags=["open inference"])
    _add_server(router, repository, report)
    _add_models(router, repository)
    for ending, path in (("", "/models/{model}"), ("_of_version", _VERSION)):
        _add_model(router, repository, ending, path)
        _describe_infer(router, ending, path)
    _add_index(router, repository)
    if has_operators:
        _add_changes(router, repository)
    _add_refusals(router)
    return router


_VERSION = "/models/{model}/versions/{version}"


def _add_server(
    router: APIRouter, repository: Repository, report: Callable[[], HealthReport]
) -> None:
    @router.get("", summary="What this server is", responses=_example(_SERVER_EXAMPLE))
    async def server() -> ServerMetadata:
        """Its name, version, and the extensions of the protocol that it has."""
        return repository.server_metadata()

    @router.get("/health/live", summary="200 while the event loop turns (v2)")
    async def live_v2() -> ServerLive:
        """The same as `/health/live`, in the words of this protocol."""
        return ServerLive()

    @router.get(
        "/health/ready",
        summary="200 while this host should be sent requests (v2)",
        responses=_SERVER_UNREADY,
        response_model=ServerReady,
        response_model_exclude={"error"},
    )
    async def ready_v2() -> ServerReady | Response:
        """The same as `/health/ready`, in the words of this protocol."""
        if report().ready:
            return ServerReady(ready=True)
        body = ServerReady(ready=False, error="this server is not ready")
        return Response(
            msgspec.json.encode(body),
            status_code=503,
            media_type="application/json",
            headers={"retry-after": "1"},
        )


def _add_models(router: APIRouter, repository: Repository) -> None:
    @router.get("/models", summary="The names of all models, for clients of KServe")
    async def models_v2() -> ModelNames:
        """Ready or not."""
        return ModelNames(models=repository.names)

    # Before those with a name in the path: no model can be asked for by the name "stats".
    @router.get("/models/stats", summary="The statistics of all models")
    async def all_statistics() -> StatisticsList:
        """Those of all versions that calls can name."""
        return repository.statistics()


def _add_model(router: APIRouter, repository: Repository, ending: str, path: str) -> None:
    """Add the routes of a model, or of a version of one: the path has the parameters."""

    async def metadata(request: Request) -> ModelMetadata:
        """The versions, inputs and outputs, with the batch as the first dimension."""
        return repository.metadata(**_named_in(request))

    async def is_ready(request: Request) -> ModelReady:
        """200 while a worker takes calls for it, and 503 otherwise."""
        named = _named_in(request)
        repository.check_ready(**named)
        return ModelReady(name=named["name"])

    async def config(request: Request) -> ServedConfig:
        """In Triton's form, as far as this service has what it tells of."""
        return repository.config(**_named_in(request))

    async def statistics(request: Request) -> StatisticsList:
        """In Triton's form. Instances are counted, where Triton counts requests."""
        return repository.statistics(**_named_in(request))

    known = {"parameters": [_path_parameter(name) for name in _parameters_of(path)]}
    routes: Sequence[tuple[str, Callable[[Request], Coroutine[Any, Any, object]], str]] = (
        ("", metadata, "The inputs and outputs of a model"),
        ("/ready", is_ready, "Whether a model is ready (v2)"),
        ("/config", config, "The configuration of a model"),
        ("/stats", statistics, "The statistics of a model"),
    )
    for rest, endpoint, summary in routes:
        router.add_api_route(
            f"{path}{rest}",
            endpoint,
            name=f"{endpoint.__name__}{ending}",
            summary=f"{summary}{', of one version' if ending else ''}",
            responses=_NO_MODEL | ({} if endpoint is statistics else _UNREADY),
            response_model_exclude_none=True,
            openapi_extra=known,
        )


def _describe_infer(router: APIRouter, ending: str, path: str) -> None:
    """Describe calls to a model, which never come here, since the exchange answers them."""
    json = {"schema": _INFER_REQUEST, "example": _INFER_EXAMPLE}
    answer = {"schema": _INFER_ANSWER, "example": _ANSWER_EXAMPLE}
    statuses = (401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504)
    router.add_api_route(
        f"{path}/infer",
        _not_here,
        methods=["POST"],
        name=f"infer{ending}",
        summary=f"Predict, as this protocol says it{', with one version' if ending else ''}",
        description="Like `/predict` with named tensors. If one instance fails, the whole call "
        "does.",
        response_class=Response,
        responses={
            200: {"content": {"application/json": answer}},
            **_error(400, "The input cannot be read, or does not fit."),
            **{each: _error(each, HTTPStatus(each).phrase)[each] for each in statuses},
        },
        openapi_extra={
            "parameters": [
                *(_path_parameter(name) for name in _parameters_of(path)),
                {
                    "name": "Inference-Header-Content-Length",
                    "in": "header",
                    "description": "The bytes of JSON before the tensors, after decompression; "
                    "without it, all is JSON.",
                    "schema": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
                },
            ],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": json,
                    "application/octet-stream": {"schema": _OCTETS},
                },
            },
        },
    )


async def _not_here(request: Request) -> None:
    """Refuse a call that the exchange has not accepted: its path has a slash at its end."""
    raise NotFoundError(f"there is nothing at {request.url.path[:200]}/; /docs lists what there is")


def _add_index(router: APIRouter, repository: Repository) -> None:
    @router.post(
        "/repository/index",
        summary="All versions of all models, and whether they are ready",
        responses=_BAD_BODY,
        response_model_exclude_defaults=True,
        openapi_extra=_body(_FILTER, {"ready": True}),
    )
    async def index(request: Request) -> Sequence[IndexEntry]:
        """Models that are unloaded too, where an operator can load and unload models."""
        asked = await _object_in(request)
        ready = asked.get("ready", False)
        if not isinstance(ready, bool):
            raise BadRequestError("ready: must be true or false")
        return repository.index(ready_only=ready)


def _add_changes(router: APIRouter, repository: Repository) -> None:
    @router.post(
        "/repository/models/{model}/load",
        summary="Load a model again",
        responses=_BAD_BODY | _NO_MODEL | _BUSY | _UNSAVED | _UNREADY,
        openapi_extra=_body(_LOAD, {}),
        response_class=Response,
    )
    async def load(request: Request, model: str) -> Response:
        """One that this service was configured with, or has unloaded, with the settings it had.

        The answer comes once it is ready. One that is loaded stays as it is.
        """
        parameters = await _parameters_in(request)
        return await changed(request, model, "load", repository.begin_load, parameters)

    @router.post(
        "/repository/models/{model}/unload",
        summary="Serve a model no longer, until it is loaded again",
        responses=_BAD_BODY | _NO_MODEL | _BUSY | _UNSAVED | _UNREADY,
        openapi_extra=_body(_UNLOAD, {}),
        response_class=Response,
    )
    async def unload(request: Request, model: str) -> Response:
        """New calls get 404. The answer comes once what it had accepted is answered.

        The next start of the service does not bring it back either.
        """
        parameters = await _parameters_in(request)
        return await changed(request, model, "unload", repository.begin_unload, parameters)

    async def changed(
        request: Request,
        model: str,
        what: str,
        begin: Callable[[str, Mapping[str, object]], bool],
        parameters: Mapping[str, object],
    ) -> Response:
        if begin(model, parameters):
            record(request, f"{what} {model}")
        await repository.until_changed(model)
        return Response()


def _add_refusals(router: APIRouter) -> None:
    """Refuse what names files of this host, or changes the service for all its clients."""
    for kind in ("system", "cuda"):
        memory = f"/{kind}sharedmemory"
        words = f"{kind} shared memory is not supported: send tensors in the body"
        for path in ("/region/{name}/status", "/status"):
            _refuse(router, "GET", f"{memory}{path}", words)
        for path in ("/region/{name}/register", "/region/{name}/unregister", "/unregister"):
            _refuse(router, "POST", f"{memory}{path}", words)
    trace = "tracing cannot be set by clients: see the setting trace_endpoint"
    log = "logging cannot be set by clients: operators have /admin/log-level"
    for path, words in (
        ("/trace/setting", trace),
        ("/models/{model}/trace/setting", trace),
        ("/logging", log),
    ):
        for method in ("GET", "POST"):
            _refuse(router, method, path, words)


def _refuse(router: APIRouter, method: str, path: str, words: str) -> None:
    async def refuse() -> None:
        raise BadRequestError(words)

    router.add_api_route(path, refuse, methods=[method], include_in_schema=False)


def _named_in(request: Request) -> dict[str, str]:
    """Return the name and the version that a path has."""
    return {"name": request.path_params["model"], "version": request.path_params.get("version", "")}


def _parameters_of(path: str) -> Sequence[str]:
    return ("model", "version") if path == _VERSION else ("model",)


def _path_parameter(name: str) -> dict[str, object]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _body(schema: Mapping[str, object], example: object) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"content": content}}


def _example(example: object) -> _Responses:
    return {200: {"content": {"application/json": {"example": example}}}}


async def _parameters_in(request: Request) -> Mapping[str, object]:
    """Return the parameters of a body.

    Raises:
        BadRequestError: It cannot be read.
        TooLargeError: It is too long.
    """
    parameters = (await _object_in(request)).get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadRequestError("parameters: must be an object")
    return parameters


async def _object_in(request: Request) -> Mapping[str, object]:
    """Return the JSON object that a body holds; an empty one without a body.

    Raises:
        BadRequestError: It holds something else, or does not arrive.
        TooLargeError: It is too long.
    """
    return object_in((await body_of(request, most_bytes=_MAX_BODY_BYTES)).strip() or b"{}")
