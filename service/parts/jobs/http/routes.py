"""The routes of jobs: `/jobs`, and calls to `/predict` that want no answer yet.

They run in the event loop of the main process.
"""

import re
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from inferpool.service.api.addresses import root_for
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.errors import WAS_HEAD
from inferpool.service.api.event_stream import EventStream
from inferpool.service.errors import (
    BadRequestError,
    ConflictError,
    UnknownJobError,
)
from inferpool.service.parts.jobs.http.documents import JobInfo, JobList, info_of
from inferpool.service.parts.jobs.http.making import (
    MOST_WAIT_S,
    ONE_VERSION,
    RETRY_S,
    JobMaker,
    version_header,
)
from inferpool.service.parts.jobs.http.results import (
    JSONL_TYPE,
    MEDIA_TYPES,
    choose_result_format,
    stream_events,
    stream_json,
    stream_lines,
)
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.records import STATES, JobState
from inferpool.service.queue.shares import Shares

MAX_STREAMS = 256
"""Streams of events of jobs at once."""
_MOST_FIRST = 2**31 - 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_ID = "the id of a job has 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first"

_Responses = dict[int | str, dict[str, Any]]
_NO_JOB: _Responses = {404: {"description": "No such job, or it is another key's."}}
_NO_PAGE: _Responses = {404: {"description": "The job `after` was deleted: begin again."}}
_ACCEPTED: _Responses = {
    202: {"description": "The job is kept, and `Location` shows how it goes."},
    404: {"description": "No such model."},
    408: {"description": "The body came too slowly."},
    413: {"description": "The body is too large."},
    415: {"description": "Nothing here reads the type of the body."},
    422: {"description": "The body does not fit, or the key belongs to another job."},
    429: {"description": "The key has all the jobs, or all the uploads, that it may have."},
    507: {"description": "The store has no room."},
}
_NO_RESULT: _Responses = {
    406: {"description": "`Accept` allows no form that there is."},
    409: {"description": "The job is not over; ask for a range."},
}
_EVENTS: _Responses = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_NO_PLACE: _Responses = {429: {"description": "The key or address has its share of streams."}}
_LINES: _Responses = {200: {"content": {JSONL_TYPE: {"schema": {"type": "string"}}}}}
_Wait = Annotated[float, Query(ge=0, le=MOST_WAIT_S, description="Seconds to wait for its end.")]
_Model = Annotated[str | None, Query(description="The model; the default one if not given.")]
_Webhook = Annotated[str | None, Query(description="A URL to tell when the job is over.")]
_First = Annotated[int | None, Query(ge=0, le=_MOST_FIRST, description="The first instance.")]
_Count = Annotated[int | None, Query(ge=1, le=_MOST_FIRST, description="The most answers.")]


def jobs_router(target: Jobs, guard: Guard, limits: Limits) -> APIRouter:
    """Return the routes, acting on a target. The application that serves them checks the key."""
    router = APIRouter(tags=["jobs"])
    maker = JobMaker(target, guard, limits)
    _add_making(router, maker)
    _add_views(router, target, maker)
    _add_result(router, target, maker)
    _add_events(router, target, maker, Shares(MAX_STREAMS, guard.share, "streams of events"))
    _add_predict(router, maker)
    return router


async def _owner_of(target: Jobs, maker: JobMaker, request: Request, id: str | None = None) -> str:
    """Return the owner of a call's jobs, once the store is open and the id could be one."""
    await target.keeper.store()
    if id is not None and not _ID.fullmatch(id):
        raise UnknownJobError(_NO_ID)  # PostgreSQL refuses some texts, such as U+0000
    return maker.owner_of(request)


def _add_making(router: APIRouter, maker: JobMaker) -> None:
    @router.post(
        "/jobs",
        status_code=202,
        summary="Begin a job",
        response_model=JobInfo,
        responses=_ACCEPTED,
    )
    async def create_job(
        request: Request, model: _Model = None, webhook: _Webhook = None
    ) -> Response:
        """The body is one of `/predict`, or lines of JSON or a tar with up to a million instances.

        An `Idempotency-Key` makes one job of calls that repeat each other. Query keys other than
        those below are parameters of the model.
        """
        return await maker.answer(request, model, None)

    @router.put(
        "/jobs/{id}",
        status_code=202,
        summary="Begin a job with an id",
        response_model=JobInfo,
        responses=_ACCEPTED,
    )
    async def put_job(
        request: Request, id: str, model: _Model = None, webhook: _Webhook = None
    ) -> Response:
        """The same as `POST /jobs`. The same call again gives the same job."""
        if not _ID.fullmatch(id):
            raise BadRequestError(_NO_ID)
        return await maker.answer(request, model, id)


def _add_views(router: APIRouter, target: Jobs, maker: JobMaker) -> None:
    owner_of = partial(_owner_of, target, maker)

    @router.get("/jobs", summary="The jobs of this key", responses=_NO_PAGE)
    async def list_jobs(
        request: Request,
        response: Response,
        state: Annotated[list[JobState] | None, Query(description="Of these states only.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    ) -> JobList:
        """The newest first, in pages."""
        owner = await owner_of(request, after)
        if after is not None:
            await target.job(after, owner)  # else a page without jobs would seem to be the last
        found = await target.jobs(owner, state or STATES, limit + 1, after)
        page = found[:limit]
        following = page[-1].id if len(found) > limit else None
        if following is not None:
            fields = [(key, value) for key, value in request.query_params.multi_items()]
            fields = [each for each in fields if each[0] != "after"] + [("after", following)]
            response.headers["link"] = (
                f'<{root_for(request.scope)}/jobs?{urlencode(fields)}>; rel="next"'
            )
        return JobList(jobs=[info_of(job) for job in page], next=following)

    @router.get("/jobs/{id}", summary="A job as it is now, or when it is over", responses=_NO_JOB)
    async def show_job(request: Request, response: Response, id: str, wait: _Wait = 0) -> JobInfo:
        """With `wait` the answer comes when the job is over, or when the time is up."""
        owner = await owner_of(request, id)
        job = await target.watches.until(id, owner, wait) if wait else await target.job(id, owner)
        if not job.is_over:
            response.headers["retry-after"] = RETRY_S
        return info_of(job)

    @router.delete(
        "/jobs/{id}",
        summary="Cancel a job, or delete one that is over",
        response_model=JobInfo,
        responses=_NO_JOB | {204: {"description": "It was over, and is deleted."}},
    )
    async def end_job(request: Request, id: str) -> JobInfo | Response:
        """A job that is not over is cancelled, and keeps its result so far until it is deleted."""
        owner = await owner_of(request, id)
        if (await target.job(id, owner)).is_over:
            await target.delete(id, owner)
            return Response(status_code=204)
        return info_of(await target.cancel(id, owner))


def _add_result(router: APIRouter, target: Jobs, maker: JobMaker) -> None:
    owner_of = partial(_owner_of, target, maker)

    @router.get(
        "/jobs/{id}/result",
        summary="The predictions of a job",
        responses=_NO_JOB | _NO_RESULT | _LINES,
    )
    async def show_result(
        request: Request, id: str, first: _First = None, count: _Count = None
    ) -> Response:
        """All predictions of a job that is over, or with `first` or `count` those that are known.

        A range goes up to the first instance that has no answer yet, and can be asked for while the
        job runs. `Accept: application/jsonl` gives a line for each.
        """
        owner = await owner_of(request, id)
        chosen = choose_result_format(",".join(request.headers.getlist("accept")))
        job = await target.job(id, owner)
        is_range = first is not None or count is not None
        if not is_range and not job.is_over:
            raise ConflictError(
                f"the job is {job.state}, {job.num_done} of {job.num_instances} instances are "
                "done; wait for its end, or ask for a range such as ?first=0",
                retry_after_s=1,
            )
        first, num = first or 0, None if is_range else job.num_instances
        answers = target.answers(id, owner, first, count)
        headers = version_header(job) | {"cache-control": "no-store"}
        if WAS_HEAD in request.scope:
            return Response(headers=headers, media_type=MEDIA_TYPES[chosen])
        lines = stream_lines(answers, first, num)
        if chosen == "json":
            lines = stream_json(answers, first, num, is_range=is_range)
        return StreamingResponse(lines, headers=headers, media_type=MEDIA_TYPES[chosen])


def _add_events(router: APIRouter, target: Jobs, maker: JobMaker, streams: Shares) -> None:
    owner_of = partial(_owner_of, target, maker)

    @router.get(
        "/jobs/{id}/events",
        summary="The progress of a job (server-sent events)",
        response_class=StreamingResponse,
        responses=_NO_JOB | _EVENTS | _NO_PLACE,
    )
    async def follow_job(request: Request, id: str) -> Response:
        """Send an event `job` now and at each change; the stream ends when the job is over."""
        owner = await owner_of(request, id)
        await target.job(id, owner)
        is_head = WAS_HEAD in request.scope
        events = stream_events(target.watches.follow(id, owner), is_head=is_head)
        return EventStream(events, streams, maker.caller_of(request), is_head=is_head)


def _add_predict(router: APIRouter, maker: JobMaker) -> None:
    @router.post("/predict", include_in_schema=False)
    async def predict_later(request: Request) -> Response:
        """Begin a job of the default model, since the call prefers `respond-async`."""
        return await maker.answer_later(request, None)

    @router.post("/predict/{model:path}", include_in_schema=False)
    async def predict_model_later(request: Request, model: str) -> Response:
        """Begin a job of a model, since the call prefers `respond-async`."""
        if "/" in model:
            raise BadRequestError(ONE_VERSION)
        return await maker.answer_later(request, model)
