"""Answers of `/predict` in the form that `Accept` asks for: JSON, npy, safetensors, raw bytes."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from inferpool.models.attached import attached
from inferpool.models.spec import DTYPE_BYTES, USUAL_INTERFACE, Interface
from inferpool.service.api.codecs.tensors import NPY_DTYPES, NPY_MAGIC, SAFETENSORS_DTYPES
from inferpool.service.api.errors import Answer, Headers, instance_error, problem
from inferpool.service.errors import BadRequestError, NotAcceptableError, ServiceError
from inferpool.service.queue.instance import Result
from inferpool.workers.shared.messages import TensorBlob

T = TypeVar("T")
AnswerFormat = Literal["json", "npy", "safetensors", "raw", "events", "lines"]
STREAMED = ("events", "lines")
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
    b"application/octet-stream": "raw",
}
"""In our order of preference."""

_JSON_HEADER = (b"content-type", JSON_TYPE)
_NPY_ALIGN = 64
_SAFETENSORS_ALIGN = 8
_UNQUOTED = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
"""Characters that `X-Tensor-Name` has as they are; all others are percent-encoded."""


def choose_format(accept: bytes | None, interface: Interface = USUAL_INTERFACE) -> AnswerFormat:
    """Return the form that an `Accept` header asks for (RFC 9110, 12.5.1), as a model has it.

    Raises:
        NotAcceptableError: It allows none of the forms that there are.
    """
    if accept is None or accept == b"*/*":
        return "json"
    if interface.streams:
        form: AnswerFormat = attached("forms of streams")(accept)
        return form
    return _negotiate(accept)


def negotiate(accept: bytes, types: Mapping[bytes, T]) -> T:
    """Choose one of several types, given in our order, by quality first.

    The most exact range for a type counts (RFC 9110, 12.5.1).

    Raises:
        NotAcceptableError: The header allows none of them.
    """
    qualities: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        media_range, *options = (part.strip() for part in item.split(b";"))
        qualities[media_range] = _quality(options)
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
        columns = _columns([_blobs_of(outcome) for outcome in outcomes], is_batch, output)
        headers, body = _ENCODERS[chosen](columns)
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


def _blobs_of(outcome: Outcome) -> list[TensorBlob]:
    assert isinstance(outcome, Result)
    assert isinstance(outcome.value, list), "JSON came where tensors were asked for"
    return outcome.value


class _OutputColumn(NamedTuple):
    """One output of all instances of a call."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[bytes]
    """Its bytes; each encoder makes the only copy of them."""


def _columns(
    instances: Sequence[list[TensorBlob]], is_batch: bool, output: str | None
) -> list[_OutputColumn]:
    """Return the outputs of all instances; a batch's along a new first dimension."""
    by_name = [{blob.name: blob for blob in blobs} for blobs in instances]
    names = list(by_name[0])
    if output is not None:
        if output not in names:
            raise BadRequestError(f"output: the model has no {output!r}; it has {_listed(names)}")
        names = [output]
    columns = []
    for name in names:
        blobs = [each[name] for each in by_name if name in each]
        if len(blobs) < len(instances):
            raise NotAcceptableError(f"output {name!r}: not every instance has it; ask for JSON")
        first = blobs[0]
        if any(blob.shape != first.shape or blob.dtype != first.dtype for blob in blobs):
            raise NotAcceptableError(
                f"output {first.name!r} differs in shape between the instances, so they cannot be "
                "stacked: ask for JSON, or send them one by one"
            )
        shape = (len(blobs), *first.shape) if is_batch else first.shape
        columns.append(_OutputColumn(name, first.dtype, shape, [blob.buffer for blob in blobs]))
    return columns


def _only(columns: Sequence[_OutputColumn]) -> _OutputColumn:
    if len(columns) != 1:
        raise BadRequestError(
            f"this form holds one output, and the model has {_listed([c.name for c in columns])}: "
            "choose by ?output=NAME, or accept application/safetensors"
        )
    return columns[0]


def _encode_npy(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    """Version 1.0 of numpy.lib.format."""
    column = _only(columns)
    descr = NPY_DTYPES.get(column.dtype)
    if descr is None:
        raise NotAcceptableError(f"npy has no {column.dtype}; accept application/safetensors")
    text = b"{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (
        descr.encode(),
        repr(column.shape).encode(),
    )
    padding = -(len(NPY_MAGIC) + 4 + len(text) + 1) % _NPY_ALIGN
    length = len(text) + padding + 1
    start = NPY_MAGIC + b"\x01\x00" + length.to_bytes(2, "little") + text + b" " * padding + b"\n"
    return [(b"content-type", b"application/x-npy")], b"".join([start, *column.parts])


def _encode_safetensors(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    """Write a header of JSON, padded with spaces to 8 bytes, then the tensors without gaps.

    The widest dtypes come first, so that each tensor is aligned.
    """
    for column in columns:
        if column.dtype not in SAFETENSORS_DTYPES:
            raise NotAcceptableError(
                f"safetensors has no {column.dtype}, which output {column.name!r} is: choose "
                "others by ?output=NAME, or accept application/octet-stream"
            )
    columns = sorted(columns, key=lambda column: -DTYPE_BYTES[column.dtype])
    entries = {}
    position = 0
    for column in columns:
        end = position + sum(map(len, column.parts))
        entries[column.name] = {
            "dtype": SAFETENSORS_DTYPES[column.dtype],
            "shape": column.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _SAFETENSORS_ALIGN)
    parts = [part for column in columns for part in column.parts]
    body = b"".join([len(text).to_bytes(8, "little"), text, *parts])
    return [(b"content-type", b"application/safetensors")], body


def _encode_raw(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    column = _only(columns)
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"x-tensor-name", quote(column.name, safe=_UNQUOTED).encode()),
        (b"x-tensor-dtype", column.dtype.encode()),
        (b"x-tensor-shape", ",".join(map(str, column.shape)).encode()),
    ]
    return headers, b"".join(column.parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


_ENCODERS: dict[AnswerFormat, Callable[[Sequence[_OutputColumn]], tuple[Headers, bytes]]] = {
    "npy": _encode_npy,
    "safetensors": _encode_safetensors,
    "raw": _encode_raw,
}
