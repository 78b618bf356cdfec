"""Answers of `/predict` in the form that `Accept` asks for; `tensor_answers` encodes tensors."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

import msgspec

from inferpool.models.attached import attached
from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.service.api.errors import Answer, instance_error, problem
from inferpool.service.errors import NotAcceptableError, ServiceError
from inferpool.service.queue.instance import Result

T = TypeVar("T")
AnswerFormat = Literal[
    "json", "npy", "npz", "safetensors", "raw", "content", "events", "lines", "pieces", "protocol"
]
"""The last two are those of another protocol than our own."""
STREAMED = ("events", "lines", "pieces")
"""Forms that send each part of a stream as it comes; see `service.parts.streams`."""
Outcome = Result | ServiceError
"""The result or error of one instance."""

JSON_TYPE = b"application/json"
MEDIA_TYPES: dict[bytes, AnswerFormat] = {
    JSON_TYPE: "json",
    b"application/x-npy": "npy",
    b"application/npy": "npy",
    b"application/safetensors": "safetensors",
    b"application/x-safetensors": "safetensors",
    b"application/x-npz": "npz",
    b"application/npz": "npz",
    b"application/octet-stream": "raw",
}
"""In our order of preference."""

_JSON_HEADER = (b"content-type", JSON_TYPE)


def choose_format(accept: bytes | None, interface: Interface = USUAL_INTERFACE) -> AnswerFormat:
    """Return the form that an `Accept` header asks for (RFC 9110, 12.5.1), as a model has it.

    Raises:
        NotAcceptableError: It allows none of the forms that there are.
    """
    if accept is None or accept == b"*/*":
        return "json"
    if interface.streams:
        chosen: AnswerFormat = attached("forms of streams")(accept)
    elif interface.media_types != ():
        chosen = attached("choice of content")(accept, interface.media_types)
    else:
        chosen = _negotiate(accept)
    return chosen


def negotiate(accept: bytes, types: Mapping[bytes, T]) -> T:
    """Choose one of several types, given in our order, by quality first.

    The most exact range for a type counts (RFC 9110, 12.5.1).

    Raises:
        NotAcceptableError: The header allows none of them.
    """
    qualities = qualities_in(accept)
    best: T | None = None
    best_quality = 0.0
    for media_type, chosen in types.items():
        candidates = (media_type, media_type.partition(b"/")[0] + b"/*", b"*/*")
        quality = next((qualities[each] for each in candidates if each in qualities), 0.0)
        if quality > best_quality:
            best, best_quality = chosen, quality
    if best is None:
        raise NotAcceptableError(
            f"Accept: {accept[:80].decode('latin-1')} allows none of "
            + ", ".join(media_type.decode() for media_type in types)
        )
    return best


def qualities_in(accept: bytes) -> dict[bytes, float]:
    """Return the quality of each range in an `Accept` header."""
    qualities: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        media_range, *options = (part.strip() for part in item.split(b";"))
        qualities[media_range] = _quality(options)
    return qualities


def encode(
    chosen: AnswerFormat,
    outcomes: Sequence[Outcome],
    *,
    is_batch: bool,
    envelope: bool = True,
    output: str | None,
    request_id: str,
    path: str,
) -> Answer:
    """Render the outcomes of the instances of one call.

    In JSON, an instance that failed is an error in its place while any succeeded; tensors have no
    place for one. If all failed, the answer is the problem of the first. Tensors get a batch
    dimension with `is_batch`. Without `envelope`, JSON is the values themselves, and in a list only
    if they are a batch. `output` names the only output wanted. The id and the path are for
    problems.
    """
    errors = [each for each in outcomes if isinstance(each, ServiceError) and not each.parts]
    if errors and (chosen != "json" or len(errors) == len(outcomes)):
        return _all_failed(outcomes, errors[0], request_id, path)
    if chosen == "json":
        values = [_json_of(outcome) for outcome in outcomes]
        return encode_json(values, envelope=envelope, is_batch=is_batch)
    try:
        headers, body = attached("answers of tensors")(chosen, outcomes, is_batch, output)
    except ServiceError as error:
        return problem(error, request_id, path)
    return 200, [*headers, (b"content-length", b"%d" % len(body))], body


def encode_json(values: Sequence[bytes], *, envelope: bool = True, is_batch: bool = True) -> Answer:
    """Answer with JSON values that are already rendered."""
    body = b",".join(values)
    if envelope:
        body = b'{"predictions":[' + body + b"]}"
    elif is_batch:
        body = b"[" + body + b"]"
    return 200, [_JSON_HEADER, (b"content-length", b"%d" % len(body))], body


@lru_cache(maxsize=256)
def _negotiate(accept: bytes) -> AnswerFormat:
    return negotiate(accept, MEDIA_TYPES)


def _quality(options: Sequence[bytes]) -> float:
    for option in options:
        name, _, value = option.partition(b"=")
        if name.strip() == b"q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0


def _all_failed(
    outcomes: Sequence[Outcome], first: ServiceError, request_id: str, path: str
) -> Answer:
    if len(outcomes) == 1:
        return problem(first, request_id, path)
    errors = [
        instance_error(outcome, index)
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome, ServiceError)
    ]
    return problem(first, request_id, path, errors=errors)


def _json_of(outcome: Outcome) -> bytes:
    if isinstance(outcome, ServiceError):
        parts = b',"parts":[' + b",".join(outcome.parts) + b"]" if outcome.parts else b""
        return b'{"error":' + msgspec.json.encode(instance_error(outcome)) + parts + b"}"
    assert isinstance(outcome.value, bytes), "tensors came where JSON was asked for"
    return outcome.value
