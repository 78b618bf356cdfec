"""Answers of Text Embeddings Inference, from those of our models. Runs in the event loop.

Errors and headers are those of TEI's router (`router/src/lib.rs` and `router/src/http/server.rs`
of huggingface/text-embeddings-inference, commit 0d124dc). Its header `x-compute-type` is left out:
the front end does not know the device.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from operator import mul

import msgspec
from msgspec import Raw

from inferpool.service.api.codecs.answers import JSON_TYPE
from inferpool.service.api.errors import Answer, Headers, kind_of
from inferpool.service.api.exchange import Call
from inferpool.service.errors import (
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    ServiceError,
    WorkerCrashedError,
)
from inferpool.service.parts.json_answers import error_with
from inferpool.service.parts.texts.requests import counted
from inferpool.service.queue.instance import Buffer, InstanceTiming, Result

Render = Callable[[Sequence[Buffer]], bytes]
"""Renders the body of an answer from the JSON of each of the model's."""


class EmptyInputsError(InvalidInputError):
    """There is nothing to compute: no input, or an empty one."""


class WrongTaskError(InvalidInputError):
    """The model does something else than the path asks for."""

    def __init__(self, message: str) -> None:
        """Store the message, with TEI's words before it."""
        super().__init__(f"Backend error: {message}")


_FAULTS: dict[type[ServiceError], tuple[int, str]] = {
    EmptyInputsError: (400, "Empty"),
    WrongTaskError: (424, "Backend"),
    ModelFailedError: (424, "Backend"),
    NonFiniteOutputError: (424, "Backend"),
    WorkerCrashedError: (424, "Backend"),
}
"""Errors that have another status than ours."""
_TYPES = {429: "Overloaded", 503: "Unhealthy"}
"""TEI's names of kinds of errors, by their status; other mistakes of clients are "Validation"."""
_FIRST_OF_OURS = 500
ONLY_LABEL = "LABEL_0"
"""The label of a reranker that names none, as transformers calls it."""


class _ErrorBody(msgspec.Struct, frozen=True):
    error: str
    error_type: str


class _Prediction(msgspec.Struct, frozen=True, gc=False):
    score: Raw
    label: Raw


_vector = msgspec.json.Decoder(bytes)
_predictions = msgspec.json.Decoder(list[_Prediction])


def error_answer(error: ServiceError, call: Call) -> Answer:
    """Render an error."""
    status = kind_of(error).status
    kind = "Validation" if status < _FIRST_OF_OURS else "Backend"
    status, kind = _FAULTS.get(type(error), (status, _TYPES.get(status, kind)))
    return error_with(_ErrorBody(error.message, kind), error, call, status)


def answer_of(
    results: Sequence[Result], render: Render, num_characters: int | None, started: float
) -> tuple[Headers, bytes]:
    """Render an answer of the model's.

    Args:
        results: Its answer for each instance: `[num_tokens, answer]` if characters were counted.
        render: Renders the body.
        num_characters: Characters of all texts; None if neither these nor tokens were counted.
        started: The moment at which the call began.

    Raises:
        ModelFailedError: An answer has not the form that was asked for.
    """
    headers: Headers = []
    answers: Sequence[Buffer] = [each.value for each in results if isinstance(each.value, bytes)]
    if num_characters is not None:
        num_tokens, answers = counted(results, "inputs", is_list=True)
        timings = [each.timing for each in results]
        headers = _metadata(num_characters, num_tokens, timings, time.monotonic() - started)
    try:
        if len(answers) < len(results):
            raise ValueError("it is no JSON")
        body = render(answers)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ModelFailedError(
            f"the model's answer has another form than asked for: {error}"
        ) from None
    return [*_json_headers(body), *headers], body


def list_of(answers: Sequence[Buffer]) -> bytes:
    """Render all answers in their order; they may be long, and so are copied once."""
    pieces = [piece for each in answers for piece in (b",", each)]
    return b"".join([b"[", *pieces[1:], b"]"])


def ranks_of(texts: Sequence[memoryview] | None) -> Render:
    """Return what renders scores of texts, the best first; with the texts, if they are given."""

    def render(answers: Sequence[Buffer]) -> bytes:
        scores = [float(each) for each in answers]
        ranks = []
        for index in sorted(range(len(scores)), key=lambda each: -scores[each]):
            text = b"" if texts is None else b'"text":%b,' % bytes(texts[index])
            ranks.append(b'{"index":%d,%b"score":%b}' % (index, text, bytes(answers[index])))
        return list_of(ranks)

    return render


def predictions(label: str | None) -> Render:
    """Return what renders scores with their labels, the best first.

    `label` is the only one of a model that answers with a score; None: answers have labels.
    """

    def render(answers: Sequence[Buffer]) -> bytes:
        if label is not None:
            name = Raw(msgspec.json.encode(label))
            lists = [[_Prediction(Raw(each), name)] for each in answers]
        else:
            lists = [_predictions.decode(each) for each in answers]
        return msgspec.json.encode(lists)

    return render


def first_of(render: Render) -> Render:
    """Return what renders the only answer, without a list around it."""
    return lambda answers: render(answers)[1:-1]


def cosines(answers: Sequence[Buffer]) -> bytes:
    """Render how alike the first vector and each other one are; all of them have length 1.

    They come as base64 of float32. 255 vectors of 1,024 take 8 ms of the event loop on one core.
    """
    first, *others = (array("f", _vector.decode(each)) for each in answers)
    source = first.tolist()
    if any(len(each) != len(source) for each in others):
        raise ValueError("vectors differ in length")
    return msgspec.json.encode([sum(map(mul, source, each)) for each in others])


def _json_headers(body: bytes) -> Headers:
    return [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body))]


def _metadata(
    num_characters: int, num_tokens: int, timings: Sequence[InstanceTiming], total_s: float
) -> Headers:
    """Return how much was computed, and in how many ms; stages are means over the inputs."""
    num = len(timings) or 1
    seconds = {
        b"x-compute-time": total_s,
        b"x-total-time": total_s,
        b"x-tokenization-time": sum(each.prepare_s for each in timings) / num,
        b"x-queue-time": sum(each.queue_s for each in timings) / num,
        b"x-inference-time": sum(each.compute_s for each in timings) / num,
    }
    return [
        (b"x-compute-characters", b"%d" % num_characters),
        (b"x-compute-tokens", b"%d" % num_tokens),
        *((name, b"%d" % (each * 1e3)) for name, each in seconds.items()),
    ]
