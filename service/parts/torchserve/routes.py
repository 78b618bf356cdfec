"""`/ping`, refusals of what TorchServe has and we have not, and descriptions of calls.

Runs in the main process's event loop.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inferpool.service.api.errors import CALL_KEY, NotFoundError
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.errors import StartError
from inferpool.service.parts.torchserve.errors import NO_RESOURCE, UNCACHED
from inferpool.service.parts.torchserve.json import pretty
from inferpool.service.settings.paths import OF_PROTOCOLS

_Json = dict[str, Any]
_REFUSED: Mapping[str, str] = {
    "/explanations/{model}": (
        "Explanations are not served here: ask /predictions/{model} of a handler that returns them"
    ),
    "/wfpredict/{model}": (
        "Workflows are not served here: ask each of their models at /predictions/{model}"
    ),
}
_CALLS: Sequence[tuple[str, str]] = (
    ("/predictions/{model}", "Predict, as TorchServe says it"),
    ("/predictions/{model}/{version}", "Predict with a version of a model"),
    ("/invocations", "Predict with the model that the query or the form names"),
)
"""Paths of calls, but for those that begin with the name of a model or with /models."""
_ERROR: _Json = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {
        "code": {"type": "integer", "description": "The status."},
        "type": {"type": "string", "description": "The name of one of TorchServe's exceptions."},
        "message": {"type": "string"},
    },
}
_ANY: _Json = {"type": "string", "format": "binary"}
_BODY: _Json = {
    "content": {
        "*/*": {"schema": _ANY},
        "application/json": {"schema": {}},
        "multipart/form-data": {"schema": {"type": "object", "additionalProperties": _ANY}},
    }
}


def inference_router(report: Callable[[], HealthReport]) -> APIRouter:
    """Return the routes; `report` returns the state of the service now."""
    router = APIRouter(tags=["torchserve"])

    async def ping() -> Response:
        """`{"status": "Healthy"}` with 200, or "Unhealthy" with 500."""
        now = report()
        # Without models too, so that a probe leaves a host alive that is to register some.
        is_ready = now.ready or not (now.models or now.draining)
        status = HTTPStatus.OK if is_ready else HTTPStatus.INTERNAL_SERVER_ERROR
        body = pretty({"status": "Healthy" if is_ready else "Unhealthy"})
        response = Response(body, status, media_type="application/json")
        response.raw_headers += UNCACHED
        return response

    router.add_api_route(
        "/ping",
        ping,
        methods=["GET"],
        summary="200 while this host should be sent requests",
        responses={500: {"description": "It should not: /health says why."}},
    )
    others = ["POST", "PUT", "DELETE"]
    router.add_api_route("/ping", ping, methods=others, name="ping_else", include_in_schema=False)
    for path in _REFUSED:
        for more in ("", "/{rest:path}"):
            router.add_api_route(
                path + more, _refuse, methods=["GET", *others], include_in_schema=False
            )
    for path, summary in _CALLS:
        _describe(router, path, summary)
    return router


def check_root_path(root_path: str) -> None:
    """Check that the setting `root_path` hides no path of TorchServe's.

    Raises:
        StartError: It does.
    """
    if root_path[1:].partition("/")[0] in OF_PROTOCOLS:
        raise StartError(
            f"root_path = {root_path!r} is removed from paths, and so hides those of TorchServe: "
            "set another one, or leave out the setting torchserve"
        )


async def _refuse(request: Request) -> Response:
    first = request.scope[CALL_KEY].path[1:].partition("/")[0]
    said = next(text for path, text in _REFUSED.items() if path.startswith(f"/{first}/"))
    raise NotFoundError(said.format(model=request.path_params["model"][:80]))


def _describe(router: APIRouter, path: str, summary: str) -> None:
    """Describe a call; it never comes here, since the exchange answers it."""
    content = {"application/json": {"schema": _ERROR}}
    names = [name for name in ("model", "version") if f"{{{name}}}" in path]
    parameters: list[_Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    if not names:
        parameters = [{"name": "model_name", "in": "query", "schema": {"type": "string"}}]
    router.add_api_route(
        path,
        _not_here,
        methods=["POST"],
        name=f"handler_of_{'_'.join(names) or 'invocations'}",
        summary=summary,
        description=(
            "The body, or the fields of a form, go to the handler as they are; JSON is parsed. "
            "The handler decides about status, headers and content type."
        ),
        responses={
            200: {"content": {"*/*": {"schema": _ANY}}},
            **{
                status: {"description": HTTPStatus(status).phrase, "content": content}
                for status in (400, 401, 403, 404, 405, 408, 413, 415, 500, 503, 504)
            },
        },
        openapi_extra={"parameters": parameters, "requestBody": _BODY},
    )


async def _not_here() -> Response:
    """Refuse a path that only resembles that of a call: the exchange has answered all others."""
    raise NotFoundError(NO_RESOURCE)
