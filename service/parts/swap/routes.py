"""/admin/models: models and their versions that come and go while the service runs."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from inferpool.service.api.addresses import root_for
from inferpool.service.api.preferences import is_async
from inferpool.service.api.routes.health import VersionInfo
from inferpool.service.parts.admin.bodies import body_of, object_in
from inferpool.service.parts.admin.repeats import AskedChanges
from inferpool.service.parts.admin.routes import ERRORS, record
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.records import ModelInfo

MAX_BODY_BYTES = 256 * 1024
_ANSWER_S = 3600.0
"""The longest that a call waits for the decision."""

_Responses = dict[int | str, dict[str, Any]]
_NO_MODEL: _Responses = {404: {"description": "No such model."}}
_BUSY: _Responses = {409: {"description": "The model is being changed already."}}
_UNFIT: _Responses = {422: {"description": "The settings cannot be used, or it was refused."}}
_UNSAVED: _Responses = {507: {"description": "The change cannot be kept for the next start."}}
_GOING_ON: _Responses = {
    202: {
        "description": "It goes on, and `Location` shows how: `Prefer: respond-async` was asked "
        "for, or it takes longer than an hour."
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """All models."""

    models: Sequence[ModelInfo]


def models_router(target: Changes, *, answer_s: float = _ANSWER_S) -> APIRouter:
    """Return the routes, acting on a target. The application that serves them checks the key.

    Args:
        target: Makes the changes.
        answer_s: The longest that a call waits for the decision.
    """
    router = APIRouter(prefix="/admin/models", tags=["admin"], responses=ERRORS)
    _add_views(router, target)
    _add_changes(router, target, answer_s)
    _add_removal(router, target)
    return router


def _add_views(router: APIRouter, target: Changes) -> None:
    @router.get("", summary="All models and their versions")
    async def models() -> ModelList:
        """The version that serves, what is being changed, and what became of earlier versions."""
        return ModelList(models=target.shown.list_models())

    @router.get("/{model}", summary="One model and its versions", responses=_NO_MODEL)
    async def show_model(model: str) -> ModelInfo:
        """The same as in the list of all models."""
        return target.model_info(model)

    @router.get("/{model}/versions", summary="The versions of a model", responses=_NO_MODEL)
    async def show_versions(model: str) -> Sequence[VersionInfo]:
        """The newest first; those that are gone too, as far as they are remembered."""
        return target.model_info(model).versions


class _ChangeCalls:
    """Begins changes, and waits for the decision as long as the caller wants."""

    def __init__(self, target: Changes, answer_s: float) -> None:
        self._target = target
        self._answer_s = answer_s
        self._asked = AskedChanges()

    async def begin(
        self, request: Request, response: Response, body: bytes, begin: Callable[[], str]
    ) -> ModelInfo:
        """Begin a change, unless it was begun before, and wait for the decision.

        It does not wait if the caller does not want to, or if the decision takes too long.
        """
        key = request.headers.get("idempotency-key")
        about = request.url.path.encode() + b"\0" + body
        asked = self._asked.begin(key, about, begin, self._target.until_decided)
        is_decided = False
        if not _is_asynchronous(request):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._answer_s):
                    await asyncio.shield(asked.decision)
                    is_decided = True
        if not is_decided:
            response.status_code = 202
            response.headers.update(_going_on_headers(request, asked.name))
        return self._target.model_info(asked.name)


def _add_changes(router: APIRouter, target: Changes, answer_s: float) -> None:
    change = _ChangeCalls(target, answer_s).begin

    @router.post("", summary="Load one more model", responses=_BUSY | _UNFIT | _UNSAVED | _GOING_ON)
    async def add_model(request: Request, response: Response) -> ModelInfo:
        """The body is a JSON object: `name`, and the settings of `[models.NAME]` in the file."""
        body = await body_of(request, most_bytes=MAX_BODY_BYTES)

        def begin() -> str:
            name = target.begin_add(object_in(body))
            record(request, f"add {name}")
            return name

        return await change(request, response, body, begin)

    @router.post(
        "/{model}/versions",
        summary="Load another version of a model, which takes over if it is good enough",
        responses=_NO_MODEL | _BUSY | _UNFIT | _UNSAVED | _GOING_ON,
    )
    async def swap_model(request: Request, response: Response, model: str) -> ModelInfo:
        """The body is a JSON object: settings of `[models.NAME]` that change, and the policy."""
        body = await body_of(request, most_bytes=MAX_BODY_BYTES)

        def begin() -> str:
            target.begin_swap(model, object_in(body))
            record(request, f"another version of {model}")
            return model

        return await change(request, response, body, begin)

    @router.post(
        "/{model}/rollback",
        summary="Let the version that served before serve again",
        responses=_NO_MODEL | _BUSY | _UNSAVED | _GOING_ON,
    )
    async def rollback_model(request: Request, response: Response, model: str) -> ModelInfo:
        """At once if it is still loaded (see `rollback_s`); else it is loaded first."""

        def begin() -> str:
            target.begin_rollback(model)
            record(request, f"rollback of {model}")
            return model

        return await change(request, response, b"", begin)


def _add_removal(router: APIRouter, target: Changes) -> None:
    @router.delete(
        "/{model}",
        status_code=204,
        summary="Serve a model no longer",
        responses=_NO_MODEL | _BUSY | _UNSAVED | _GOING_ON,
    )
    async def remove_model(request: Request, model: str, ephemeral: bool = False) -> Response:
        """New calls get 404. The answer comes once what it had accepted is answered.

        The next start of the service does not bring it back, unless `ephemeral` is true.
        """
        target.begin_remove(model, ephemeral=ephemeral)
        record(request, f"remove {model}")
        if _is_asynchronous(request):
            return Response(
                msgspec.json.encode(target.model_info(model)),
                status_code=202,
                headers=_going_on_headers(request, model),
                media_type="application/json",
            )
        await target.until_decided(model)
        return Response(status_code=204)


def _is_asynchronous(request: Request) -> bool:
    """Return whether the caller does not want to wait for the decision (RFC 7240, 4.1)."""
    return is_async(request.headers.raw)


def _going_on_headers(request: Request, name: str) -> dict[str, str]:
    """Return the headers that say where a change that goes on is shown."""
    headers = {"location": f"{root_for(request.scope)}/admin/models/{name}"}
    if _is_asynchronous(request):
        headers["preference-applied"] = "respond-async"
    return headers
