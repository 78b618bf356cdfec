"""/admin: what an operator does to a running service. Each action leaves a line in the log.

No route here reads a body, so that there is none to bound or to wait for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from fastapi import APIRouter, Request, Response

from service.api.auth import caller_of
from service.api.errors import CALL_KEY

if TYPE_CHECKING:
    from service.api.call import Call

logger = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]

_Responses = dict[int | str, dict[str, Any]]
_ERRORS: _Responses = {
    401: {"description": "No key, or none that is known."},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """Whether this host asks not to be sent requests."""

    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """Workers that are restarted one after another; /health shows how it goes."""

    workers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """The least severe log lines that are written."""

    level: LogLevel


class AdminTarget(Protocol):
    """What does it all."""

    def set_draining(self, is_draining: bool) -> None:
        """Turn readiness red, or green again.

        Raises:
            ConflictError: The service is shutting down, which cannot be undone.
        """

    def restart(self, model: str, slot: int | None) -> Sequence[str]:
        """Begin to replace one worker of a model, or each in turn, and name them.

        Raises:
            UnknownModelError: There is no such model.
            NotFoundError: There is no such worker.
            ConflictError: Workers of the model are being replaced.
        """

    def settings_json(self) -> str:
        """Every setting in force and who set it, without secrets."""


def admin_router(target: AdminTarget) -> APIRouter:
    """The routes, acting on a target. Whoever serves them checks the key."""
    logger.setLevel(logging.INFO)  # whatever the level of the rest: these lines are never left out
    router = APIRouter(prefix="/admin", tags=["admin"], responses=_ERRORS)

    @router.post(
        "/drain", summary="Turn readiness red, and go on serving; for /admin/resume to undo"
    )
    async def drain(request: Request) -> Draining:
        """Balancers send nothing more; what comes all the same is answered."""
        target.set_draining(True)
        _record(request, "drain")
        return Draining(draining=True)

    @router.post("/resume", summary="Turn readiness green again", responses=_BUSY)
    async def resume(request: Request) -> Draining:
        """Undo a drain; a shutdown cannot be undone."""
        target.set_draining(False)
        _record(request, "resume")
        return Draining(draining=False)

    @router.post(
        "/models/{model}/restart",
        status_code=202,
        summary="Replace the workers of a model one after another, each once it has finished",
        responses=_NOT_THERE | _BUSY,
    )
    async def restart_model(request: Request, model: str) -> Restarting:
        """Answered when it has begun; /health shows how it goes."""
        workers = target.restart(model, None)
        _record(request, f"restart of {', '.join(workers)}")
        return Restarting(workers=workers)

    @router.post(
        "/models/{model}/workers/{number}/restart",
        status_code=202,
        summary="Replace one worker, once it has finished what it holds",
        responses=_NOT_THERE | _BUSY,
    )
    async def restart_worker(request: Request, model: str, number: int) -> Restarting:
        """Answered when it has begun; /health shows how it goes."""
        workers = target.restart(model, number)
        _record(request, f"restart of {', '.join(workers)}")
        return Restarting(workers=workers)

    @router.get(
        "/settings",
        summary="Every setting in force and who set it; keys are not shown",
        responses={200: {"content": {"application/json": {"schema": _SETTINGS}}}},
    )
    async def settings(request: Request) -> Response:
        """As `inferpool config --json` prints them."""
        _record(request, "show settings")
        return Response(target.settings_json(), media_type="application/json")

    @router.get("/log-level", summary="The least severe log lines that are written")
    async def log_level() -> Logging:
        """The setting `log_level`, or what was put since the start."""
        return Logging(level=_level_now())

    @router.put("/log-level/{level}", summary="Write more or fewer log lines, until the next start")
    async def set_log_level(request: Request, level: LogLevel) -> Logging:
        """Until the next start; lines of administration are always written."""
        before = _level_now()
        logging.getLogger().setLevel(level.upper())
        _record(request, f"log level {before} -> {level}")
        return Logging(level=level)

    return router


def _level_now() -> LogLevel:
    number = logging.getLogger().level
    known: Sequence[LogLevel] = get_args(LogLevel)
    return min(known, key=lambda name: abs(getattr(logging, name.upper()) - number))


def _record(request: Request, action: str) -> None:
    """Write what was done, for whom, under which id."""
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
