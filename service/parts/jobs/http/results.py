"""Results and progress of jobs as streams: JSON, lines of JSON, server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from inferpool.service.api.codecs.answers import negotiate
from inferpool.service.api.errors import TABLE, InstanceError
from inferpool.service.errors import InternalError
from inferpool.service.parts.jobs.http.documents import info_of
from inferpool.service.parts.jobs.records import Job, JobAnswer, JobProblem

Answers = AsyncIterator[Sequence[tuple[int, JobAnswer, int]]]
"""Chunks of answers: number of the instance, answer, version of the model that computed it."""
ResultFormat = Literal["json", "jsonl"]

JSONL_TYPE = "application/jsonl"
MEDIA_TYPES: Mapping[ResultFormat, str] = {"json": "application/json", "jsonl": JSONL_TYPE}
_FORMATS: Mapping[bytes, ResultFormat] = {
    b"application/json": "json",
    b"application/jsonl": "jsonl",
    b"application/x-ndjson": "jsonl",
    b"application/jsonlines": "jsonl",
}
_STATUSES = {error.code: kind.status for error, kind in TABLE.items()}
_ALIVE_S = 15.0
"""How often a stream of events says something, so that proxies keep it open."""
_PAUSE_S = 0.2
"""The least time between two events."""


def choose_result_format(accept: str) -> ResultFormat:
    """Return the form of a result that an `Accept` header asks for (RFC 9110, 12.5.1).

    Raises:
        NotAcceptableError: It allows neither.
    """
    return negotiate(accept.encode("latin-1") or b"*/*", _FORMATS)


def error_of(problem: JobProblem, index: int | None = None) -> InstanceError:
    """Return the error of an instance, in the form that it has in answers of `/predict`."""
    status = _STATUSES.get(problem.code, _STATUSES[InternalError.code])
    return InstanceError(code=problem.code, message=problem.message, status=status, index=index)


def prediction_of(answer: JobAnswer) -> bytes:
    """Return the JSON of an answer: its prediction, or an error in its place."""
    if answer.problem is None:
        return answer.value
    return b'{"error":' + msgspec.json.encode(error_of(answer.problem)) + b"}"


async def stream_json(
    answers: Answers, first: int, num: int | None, *, is_range: bool
) -> AsyncIterator[bytes]:
    """Yield a result as one JSON object; see `_in_order` for `num`."""
    yield b'{"predictions":['
    comma, end = b"", first
    async for chunk in _in_order(answers, first, num):
        yield comma + b",".join(prediction_of(answer) for _, answer, _ in chunk)
        comma, end = b",", end + len(chunk)
    yield b'],"first":%d,"next":%d}' % (first, end) if is_range else b"]}"


async def stream_lines(answers: Answers, first: int, num: int | None) -> AsyncIterator[bytes]:
    """Yield a result as lines of JSON; see `_in_order` for `num`."""
    async for chunk in _in_order(answers, first, num):
        yield b"".join(_lines_of(chunk))


async def stream_events(
    changes: AsyncGenerator[Job, None], *, is_head: bool
) -> AsyncIterator[bytes]:
    """Yield a job at each change as server-sent events (HTML standard, 9.2)."""
    number = 0
    coming: asyncio.Future[Job] | None = None
    try:
        while not is_head:
            if coming is None:
                coming = asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([coming], timeout=_ALIVE_S)
            if not done:
                yield b": \n\n"
                continue
            try:
                job = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield b"event: job\nid: %d\ndata: %b\n\n" % (number, msgspec.json.encode(info_of(job)))
            number += 1
            if not job.is_over:
                await asyncio.sleep(_PAUSE_S)
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await changes.aclose()


async def _in_order(answers: Answers, first: int, num: int | None) -> Answers:
    """Yield answers up to the first instance that has none.

    Args:
        answers: The answers from an instance on.
        first: The number of that instance.
        num: How many there must be; None for any number. If there are fewer, the job was deleted
            meanwhile, and breaking the answer off tells the client.
    """
    expected = first
    async for chunk in answers:
        whole = 0
        for index, _, _ in chunk:
            if index != expected:
                break
            expected, whole = expected + 1, whole + 1
        if whole:
            yield chunk[:whole]
        if whole < len(chunk):
            break
    if num is not None and expected != first + num:
        raise ConnectionAbortedError("the job was deleted while its result was read")


def _lines_of(chunk: Sequence[tuple[int, JobAnswer, int]]) -> Iterator[bytes]:
    for index, answer, version in chunk:
        of = b',"version":%d' % version if version else b""
        if answer.problem is None:
            yield b'{"index":%d%b,"prediction":%b}\n' % (index, of, answer.value)
        else:
            error = msgspec.json.encode(error_of(answer.problem))
            yield b'{"index":%d%b,"error":%b}\n' % (index, of, error)
