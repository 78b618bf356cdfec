"""/admin: what an operator does to a running service. Each action leaves a line in the log.

No route here reads a body, so there is none to bound or to wait for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from fastapi import APIRouter, Path, Query, Request, Response

from inferpool.service.api.auth import caller_of
from inferpool.service.api.errors import CALL_KEY
from inferpool.service.parts.admin.operations import HostSpeed, Operations

if TYPE_CHECKING:
    from inferpool.service.api.exchange import Call

logger = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]

_Responses = dict[int | str, dict[str, Any]]
ERRORS: _Responses = {
    401: {"description": "No key, or no known one."},
    403: {"description": "The key is not one of `admin_keys`."},
}
_NOT_THERE: _Responses = {404: {"description": "No such model or worker."}}
_SETTINGS = {
    "type": "object",
    "description": "By dotted key.",
    "additionalProperties": {
        "type": "object",
        "required": ["value", "origin"],
        "properties": {"value": {}, "origin": {"type": "string", "description": "Who set it."}},
    },
}
_BUSY: _Responses = {409: {"description": "Workers of the model are being restarted already."}}
_RESTARTING: _Responses = {
    202: {"description": "It takes longer than 30 s and goes on; /health shows how."},
}
_NO_HOST: _Responses = {404: {"description": "No such host is connected."}}
_MEASURING: _Responses = {
    409: {"description": "The connection is being measured already."},
    503: {"description": "The host was lost meanwhile."},
}
OldFirst = Annotated[
    bool,
    Query(
        description="Let each worker leave before its successor starts, if memory has no room for "
        "both. If the successor then fails, nothing serves in its place."
    ),
]

WorkerNumber = Annotated[int, Path(ge=0, le=1_000_000, description="Counted from 0.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The host asks not to be sent requests, or not."""

    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """Workers that have been replaced one after another; with status 202 that still goes on."""

    workers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """The least severe log lines that are written."""

    level: LogLevel


def admin_router(target: Operations) -> APIRouter:
    """Return the routes, acting on a target. The application that serves them checks the key."""
    logger.setLevel(logging.INFO)  # always, at any level of the rest
    router = APIRouter(prefix="/admin", tags=["admin"], responses=ERRORS)
    _add_drain(router, target)
    _add_restarts(router, target)
    _add_views(router, target)
    _add_log_level(router)
    return router


def _add_drain(router: APIRouter, target: Operations) -> None:
    @router.post("/drain", summary="Turn readiness red, but serve on; /admin/resume undoes it")
    async def drain(request: Request) -> Draining:
        """Balancers send no more requests; those that come all the same are answered."""
        target.set_draining(True)
        record(request, "drain")
        return Draining(draining=True)

    @router.post("/resume", summary="Turn readiness green again", responses=_BUSY)
    async def resume(request: Request) -> Draining:
        """Undo a drain; a shutdown cannot be undone."""
        target.set_draining(False)
        record(request, "resume")
        return Draining(draining=False)


def _add_restarts(router: APIRouter, target: Operations) -> None:
    async def restarted(
        request: Request, response: Response, model: str, number: int | None, old_first: bool
    ) -> Restarting:
        workers = target.restart(model, number, old_first=old_first)
        record(request, f"restart of {', '.join(workers)}")
        if not await target.until_restarted(model):
            response.status_code = 202
        return Restarting(workers=workers)

    @router.post(
        "/models/{model}/restart",
        summary="Replace the workers of a model one after another by ones that load it anew",
        responses=_NOT_THERE | _BUSY | _RESTARTING,
    )
    async def restart_model(
        request: Request, response: Response, model: str, old_first: OldFirst = False
    ) -> Restarting:
        """Each successor is ready before the old worker leaves; if it fails, the old one stays."""
        return await restarted(request, response, model, None, old_first)

    @router.post(
        "/models/{model}/workers/{number}/restart",
        summary="Replace one worker by one that loads the model anew",
        responses=_NOT_THERE | _BUSY | _RESTARTING,
    )
    async def restart_worker(
        request: Request,
        response: Response,
        model: str,
        number: WorkerNumber,
        old_first: OldFirst = False,
    ) -> Restarting:
        """The successor is ready before the old worker leaves; if it fails, the old one stays."""
        return await restarted(request, response, model, number, old_first)


def _add_views(router: APIRouter, target: Operations) -> None:
    @router.post(
        "/hosts/{host}/measure",
        summary="Measure the connection between the front end and a host",
        responses=_NO_HOST | _MEASURING,
    )
    async def measure_host(request: Request, host: str) -> HostSpeed:
        """Some MiB go to its agent and back, beside the batches, which wait a little longer."""
        record(request, f"measure {host[:80]}")
        return await target.measure_host(host)

    @router.get(
        "/settings",
        summary="Every setting in force and who set it; keys are not shown",
        responses={200: {"content": {"application/json": {"schema": _SETTINGS}}}},
    )
    async def settings(request: Request) -> Response:
        """The same as `inferpool config --json` prints."""
        record(request, "show settings")
        return Response(target.settings_json(), media_type="application/json")


def _add_log_level(router: APIRouter) -> None:
    @router.get("/log-level", summary="The least severe log lines that are written")
    async def log_level() -> Logging:
        """The setting `log_level`, or the level that was put since the start."""
        return Logging(level=_level_now())

    @router.put("/log-level/{level}", summary="Write more or fewer log lines, until the next start")
    async def set_log_level(request: Request, level: LogLevel) -> Logging:
        """The level holds until the next start; admin actions are always logged."""
        before = _level_now()
        logging.getLogger().setLevel(level.upper())
        record(request, f"log level {before} -> {level}")
        return Logging(level=level)


def _level_now() -> LogLevel:
    number = logging.getLogger().level
    known: Sequence[LogLevel] = get_args(LogLevel)
    return min(known, key=lambda name: abs(getattr(logging, name.upper()) - number))


def record(request: Request, action: str) -> None:
    """Log an action with its caller and its id."""
    call: Call = request.scope[CALL_KEY]
    logger.info(
        "admin: %s",
        action,
        extra={
            **call.log_ids(),
            "key": caller_of(call.headers),
            "client": request.client.host if request.client else "unknown",
        },
    )
