"""Turns HTTP calls into jobs: `POST /jobs`, `PUT /jobs/{id}`, `/predict` with `respond-async`.

`Prefer` is that of RFC 7240, `Idempotency-Key` that of an Internet-Draft
(draft-ietf-httpapi-idempotency-key-header). In the event loop of the main process.
"""

import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from inferpool.service.api.addresses import root_for
from inferpool.service.api.auth import Guard, key_of
from inferpool.service.api.codecs.answers import choose_format
from inferpool.service.api.codecs.body import BodyContext, Limits
from inferpool.service.api.codecs.parameters import read_query
from inferpool.service.api.codecs.requests import check_encoding
from inferpool.service.api.errors import CALL_KEY
from inferpool.service.api.event_stream import client_of
from inferpool.service.api.exchange import VERSION_HEADER, Call
from inferpool.service.api.preferences import Preferences, read_preferences
from inferpool.service.errors import BadRequestError, NotAcceptableError
from inferpool.service.parts.jobs.http.documents import info_of
from inferpool.service.parts.jobs.http.results import prediction_of, stream_json
from inferpool.service.parts.jobs.http.uploads import Uploads
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.records import Job, NewJob
from inferpool.service.parts.jobs.threads import in_thread
from inferpool.service.queue.shares import Shares
from inferpool.service.settings.keys import digest_of

MOST_WAIT_S = 60
"""The longest that a call waits for the end of a job."""
RETRY_S = "1"
"""When to ask again for a job that is not over."""
ONE_VERSION = (
    "a job cannot ask for one version of a model: the version that serves at the time computes it, "
    "and its result says which one that was"
)
_MOST_KEY = 255
NUM_READERS = 4
"""Bodies that are read and stored at once."""
_PRIORITIES = {str(priority): priority for priority in range(1, 10)}
_DEFAULT_PRIORITY = 5
_CLIENT_GONE = 499


class JobMaker:
    """Creates jobs from calls."""

    def __init__(self, target: Jobs, guard: Guard, limits: Limits) -> None:
        self._target = target
        self._guard = guard
        self._limits = limits
        self._uploads = Uploads(limits, guard.share)
        # A form with many files takes a minute to read, and nothing else must wait for it.
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="bodies of jobs")
        self._reading = Shares(NUM_READERS, guard.share, "bodies that are read")

    def owner_of(self, request: Request) -> str:
        """Return the owner of a call's jobs: its key's digest, or "" where none is needed."""
        key = key_of(_call(request).headers)
        return digest_of(key).hex() if key and self._guard.restricts_predict else ""

    def caller_of(self, request: Request) -> str:
        """Return the owner of what a call about jobs uses, for its share."""
        return self._guard.owner_of("predict", _call(request).headers, client_of(request))

    async def answer(self, request: Request, model: str | None, id: str | None) -> Response:
        """Create a job, and answer with what it is.

        Args:
            request: The call.
            model: The model; None for the default one.
            id: The id that the client gives to the job; None to make one.

        Raises:
            ServiceError: There is no job.
        """
        preferences = _preferences(request)
        try:
            job = await self._make(request, model, id, ("model", "webhook"))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)  # nobody sees it
        return _shown(request, await self._until(job, preferences), preferences)

    async def answer_later(self, request: Request, model: str | None) -> Response:
        """Create a job; answer as `/predict` would if it is over within the time to wait.

        Raises:
            ServiceError: There is no job.
        """
        preferences = _preferences(request)
        if choose_format(_call(request).headers.get(b"accept")) != "json":
            raise NotAcceptableError(
                "Accept: a call with `Prefer: respond-async` is answered in JSON only"
            )
        try:
            job = await self._make(request, model, None, ("webhook",))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)  # nobody sees it
        job = await self._until(job, preferences)
        if preferences.wait_s and job.is_over and job.num_done > job.num_failed:
            return await self._predictions(job, preferences)
        return _shown(request, job, preferences)

    async def _make(
        self, request: Request, model: str | None, id: str | None, ours: Sequence[str]
    ) -> Job:
        """Create a job from a call's body. `ours` are query keys that no model sees."""
        target, call = self._target, _call(request)
        headers = call.headers
        await target.keeper.store()
        model = target.model_named(model)
        check_encoding(headers)  # before the whole body has come
        if VERSION_HEADER in headers:
            raise BadRequestError(ONE_VERSION)
        from inferpool.service.parts.jobs.http.reading import read_body  # only once a job comes

        fields = dict(read_query(call.query))
        webhook = {name: fields.pop(name, None) for name in ours}["webhook"]
        if webhook is not None:
            target.webhooks.check(webhook)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MOST_KEY:
            raise BadRequestError(f"Idempotency-Key: must have 1 to {_MOST_KEY} characters")
        given = request.headers.get("x-priority")
        if given is not None and given not in _PRIORITIES:
            raise BadRequestError("X-Priority: must be 1 (first) to 9 (last)")
        priority = _DEFAULT_PRIORITY if given is None else _PRIORITIES[given]
        owner, caller = self.owner_of(request), self.caller_of(request)
        query = urlencode(sorted(fields.items()))
        inputs, interface = target.inputs_of(model), target.interface_of(model)
        head = BodyContext(headers, query.encode(), inputs, self._limits, interface)
        content_type = headers.get(b"content-type", b"")
        async with (
            self._uploads.take(request, caller, owner, target.spool_folder) as spool,
            self._reading.place_in_line(caller),
        ):
            body = await in_thread(read_body, content_type, spool.path, head, threads=self._readers)
            about = [model, query, content_type, priority, webhook, spool.digest()]
            new = NewJob(
                id=id or secrets.token_hex(16),
                owner=owner,
                model=model,
                parameters=body.parameters,
                body_digest=hashlib.sha256(msgspec.json.encode(about)).hexdigest(),
                idempotency_key=key,
                webhook=webhook,
                priority=priority,
                trace=f"{call.trace_id}-{call.span_id}" if call.parent_id else "",
                request_id=call.request_id,
            )
            job = await target.create(new, body.instances)
        call.job = job.id
        return job

    async def _until(self, job: Job, preferences: Preferences) -> Job:
        """Wait for the end of a job for as long as the client is ready to."""
        if not preferences.wait_s or job.is_over:
            return job
        return await self._target.watches.until(job.id, job.owner, preferences.wait_s)

    async def _predictions(self, job: Job, preferences: Preferences) -> Response:
        answers = self._target.answers(job.id, job.owner, 0, None)
        headers = version_header(job) | {"preference-applied": preferences.applied}
        if job.num_instances == 1 and not self._target.interface_of(job.model).envelope:
            values = [prediction_of(answer) async for chunk in answers for _, answer, _ in chunk]
            return Response(b"".join(values), headers=headers, media_type="application/json")
        stream = stream_json(answers, 0, job.num_instances, is_range=False)
        return StreamingResponse(stream, headers=headers, media_type="application/json")


def version_header(job: Job) -> dict[str, str]:
    """Return the header of the version that computed the job, if it was one."""
    return {"x-model-version": str(job.versions[0])} if len(job.versions) == 1 else {}


def _call(request: Request) -> Call:
    call: Call = request.scope[CALL_KEY]
    return call


def _preferences(request: Request) -> Preferences:
    return read_preferences(",".join(request.headers.getlist("prefer"))).at_most(MOST_WAIT_S)


def _shown(request: Request, job: Job, preferences: Preferences) -> Response:
    headers = {"location": f"{root_for(request.scope)}/jobs/{job.id}"}
    if not job.is_over:
        headers["retry-after"] = RETRY_S
    if preferences.applied:
        headers["preference-applied"] = preferences.applied
    body = msgspec.json.encode(info_of(job))
    return Response(body, status_code=202, headers=headers, media_type="application/json")
